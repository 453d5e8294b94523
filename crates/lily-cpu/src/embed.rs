//! Token embedding.

use lily_model::weights::Weights;

use crate::buffers::Buffer;
use crate::device::Device;

/// Rows of the embedding matrix, `[tokens, hidden]`.
pub fn forward<'a>(device: &'a Device, w: &Weights, tokens: &[u32]) -> Buffer<'a, f32> {
    let hidden = w.embedding.cols;
    let mut x = device.buffers.floats(tokens.len() * hidden);
    device.pool.chunks(&mut x, hidden, |i, x| w.embedding.read_row(tokens[i] as usize, x));
    x
}

//! Token embedding.

use lily_model::weights::Weights;
use rayon::prelude::*;

/// Rows of the embedding matrix, `[tokens, hidden]`.
pub fn forward(w: &Weights, tokens: &[u32]) -> Vec<f32> {
    let hidden = w.embedding.cols;
    let mut x = vec![0.0; tokens.len() * hidden];
    x.par_chunks_exact_mut(hidden)
        .zip(tokens)
        .for_each(|(x, &token)| w.embedding.read_row(token as usize, x));
    x
}

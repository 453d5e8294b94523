//! Gated DeltaNet between its two projections: how `kernels/gdn.cu` is launched.

use lily_model::config::GdnConfig;

use crate::driver::{Args, Buffer, Context, DriverError, Shape};
use crate::forward::Device;
use crate::step::Plan;
use crate::weights::DeviceMatrix;

/// Width of the value heads that `delta_4` takes whole.
const WHOLE: usize = 128;
/// Columns of a head that a block of `delta_1` has.
const COLUMNS: usize = 32;
/// Segments from which on whole heads are faster.
const MANY: u32 = 4;
/// Threads of a block of `delta_4`.
const HEAD_THREADS: u32 = 128;

/// Dynamic shared memory of a block of `delta_4`, bytes: `Head` of the kernel. `None` where the kernel can't be used.
pub fn shared_memory(g: &GdnConfig, context: &Context) -> Option<u32> {
    let inputs = (2 * g.key_dim + 2 * WHOLE + 46).next_multiple_of(4);
    let bytes = 4 * (g.key_dim * WHOLE + inputs + 2 * WHOLE + 4).next_multiple_of(32) as u32;
    (g.value_dim == WHOLE && bytes <= context.shared_memory).then_some(bytes)
}

/// Dynamic shared memory by kernel.
pub fn shared(g: &GdnConfig, context: &Context) -> Option<(&'static str, u32)> {
    shared_memory(g, context).map(|bytes| ("delta_4", bytes))
}

impl Device {
    /// Convolution and delta rule of layer `index` of its kind. Says whether it leaves columns for the product with `output`.
    pub(crate) fn delta(
        &self,
        vectors: &[Buffer; 4],
        index: u64,
        plan: &Plan,
        output: &DeviceMatrix,
    ) -> Result<bool, DriverError> {
        let (b, s, g, segments) = (&self.buffers, &self.state, &self.config.gdn, plan.segments as u32);
        let [segment_table, ..] = self.parts();
        let [conv, a_log, dt_bias, norm] = vectors.each_ref().map(Buffer::address);
        let states = s.recurrent.address() + index * 4 * g.state_len() as u64;
        let convs = s.conv.address() + index * 2 * 4 * g.conv_state_len() as u64;
        // Few sequences are spread over many blocks; for many, a block does once what a head's columns have in common.
        let heads = segments * g.value_heads as u32;
        let whole = shared_memory(g, &self.context).filter(|_| segments >= MANY);
        let [records, groups] =
            if whole.is_some() { self.columns_of(output, plan.rows as u32) } else { [0; 2] };
        // `Delta` of the kernels.
        let mut args = Args::new();
        args.words(&[
            segment_table,
            b.projected.address(),
            conv,
            a_log,
            dt_bias,
            norm,
            states,
            s.sizes.recurrent as u64 / 4,
            convs,
            s.sizes.conv as u64 / 4,
            b.mixed.address(),
            b.squares.address(),
            records,
            groups,
        ]);
        let moved = u64::from(segments) * 2 * 4 * (g.state_len() + g.conv_state_len()) as u64;
        args.moves(moved + vectors.iter().map(|v| v.bytes() as u64).sum::<u64>());
        let Some(shared) = whole else {
            let parts = (g.value_dim / COLUMNS) as u32;
            self.launch("delta_1", [heads * parts, 1, 1], &mut args)?;
            return Ok(false);
        };
        let shape = Shape { grid: [heads, 1, 1], threads: HEAD_THREADS, shared, overlap: true };
        self.launch_with("delta_4", shape, &mut args)?;
        // Whole heads have their norm.
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_that_are_not_one_piece_or_do_not_fit_are_left_to_the_other_kernel() {
        let bytes = |key_dim, value_dim| {
            let g = GdnConfig { key_heads: 16, value_heads: 32, key_dim, value_dim, conv_kernel: 4 };
            shared_memory(&g, &Context::h200())
        };
        // Three share a multiprocessor's 228 KB, of which each takes one more.
        assert!(bytes(128, 128).is_some_and(|bytes| 3 * (bytes + 1024) <= 228 << 10));
        assert!(bytes(256, 128).is_some());
        assert_eq!(bytes(512, 128), None);
        assert_eq!(bytes(128, 64), None);
    }
}

//! Gated DeltaNet blocks of a step of several tokens.

use std::ops::Range;

use crate::builder::{Bindings, Builder, F32};
use crate::plan::{Access, LANES, Segment};

/// From so many tokens on, the delta rule goes chunk by chunk. It takes one launch more; see docs/lab/metal.md for the count.
const CHUNKS_FROM: usize = 16;
/// Tokens of a chunk: `DELTA_CHUNK` of `delta_chunks.metal`.
pub const DELTA_CHUNK: usize = 32;
/// Values of a chunk's matrices, of one head: `CHUNK_MATRICES` of `delta_chunks.metal`, of 64 values.
pub const CHUNK_MATRICES: usize = 33 * 64;
/// Values of the products of keys and queries of a chunk: 20 matrices.
const CHUNK_PRODUCTS: usize = 20 * 64;
/// SIMD-groups of `delta_chunks`; each has 8 columns of the state.
const CHUNKS_SIMDGROUPS: usize = 4;

/// Whether the delta rule goes over a segment's tokens chunk by chunk.
fn is_chunked(segment: &Segment) -> bool {
    segment.tokens >= CHUNKS_FROM
}

impl Bindings<'_, '_> {
    /// Keys, queries and matrices of chunks.
    fn chunks(self, chunks: &Range<usize>, access: Access) -> Self {
        let g = &self.builder.config.gdn;
        let width = g.key_heads * DELTA_CHUNK * g.key_dim;
        self.scratch("chunk_keys", width, chunks, access)
            .scratch("chunk_queries", width, chunks, access)
            .scratch("chunk_matrices", g.value_heads * CHUNK_MATRICES, chunks, access)
    }
}

impl Builder<'_> {
    /// Gated DeltaNet mixer of a layer; without `out` only its state is wanted.
    pub fn gdn_rows(&mut self, layer: usize, out: bool) {
        let g = &self.config.gdn;
        let (channels, value_width) = (g.conv_channels(), g.value_width());
        let name = |module: &str| format!("layers.{layer}.linear_attn.{module}");
        let rows = self.all_rows();
        self.norm_input(layer);
        let z = ("z", name("in_proj_z"), value_width);
        let mut products = vec![
            ("qkv", name("in_proj_qkv"), channels),
            ("b", name("in_proj_b"), g.value_heads),
            ("a", name("in_proj_a"), g.value_heads),
        ];
        // Chunks need z behind their delta rule only, which leaves most of the units idle.
        let late = (0..self.segments.len()).all(|segment| self.in_chunks(segment));
        if !late {
            products.push(z.clone());
        }
        self.project(rows.len(), &products);
        for segment in 0..self.segments.len() {
            if self.in_chunks(segment) {
                self.prepare_chunks(segment, layer);
                self.delta_chunks(segment, layer);
            } else {
                self.delta(segment, layer);
            }
        }
        if late && out {
            self.project(rows.len(), &[z]);
            self.delay_last();
        }
        for segment in 0..self.segments.len() {
            self.keep_inputs(segment, layer);
        }
        if !out {
            return;
        }
        self.norm_heads(layer);
        self.add_product("gated", value_width, &name("out_proj"));
    }

    /// The norms of all heads behind the delta rule; of chunks gain and gate too. Segments beside each other that are alike are one launch.
    fn norm_heads(&mut self, layer: usize) {
        let value_width = self.config.gdn.value_width();
        let half = self.with_tensors(self.all_rows().len());
        let (segments, mut first) = (self.segments, 0);
        for alike in segments.chunk_by(|a, b| is_chunked(a) == is_chunked(b)) {
            let chunks = is_chunked(&alike[0]);
            let rows = first..first + alike.iter().map(|s| s.tokens).sum::<usize>();
            first = rows.end;
            let mut bindings = self.bind().scratch("squares", value_width / LANES, &rows, Access::Read);
            if chunks {
                bindings = bindings
                    .scratch("z", value_width, &rows, Access::Read)
                    .vector(&format!("layers.{layer}.linear_attn.norm"));
            }
            let gated = if half { Access::Read } else { Access::ReadWrite };
            bindings = bindings.scratch("gated", value_width, &rows, gated);
            if half {
                bindings = bindings.halves("gated_half", value_width, &rows, Access::Write);
            }
            let list = bindings.list;
            let kernel = match (chunks, half) {
                (true, true) => "gate_heads_half",
                (true, false) => "gate_heads",
                (false, true) => "norm_heads_half",
                (false, false) => "norm_heads",
            };
            self.launch(kernel, [value_width.div_ceil(256), rows.len(), 1], 256, Vec::new(), list);
        }
    }

    /// Whether the delta rule goes over a segment's tokens chunk by chunk.
    fn in_chunks(&self, segment: usize) -> bool {
        is_chunked(&self.segments[segment])
    }

    /// A segment's chunks among those of the step.
    fn chunks(&self, segment: usize) -> Range<usize> {
        let of = |s: usize| if self.in_chunks(s) { self.segments[s].tokens.div_ceil(DELTA_CHUNK) } else { 0 };
        let first = (0..segment).map(of).sum();
        first..first + of(segment)
    }

    /// All of a segment's chunks that does not depend on the state.
    fn prepare_chunks(&mut self, segment: usize, layer: usize) {
        let g = &self.config.gdn;
        let (channels, taps, key_width) = (g.conv_channels(), g.conv_kernel, g.key_heads * g.key_dim);
        let (rows, chunks) = (self.rows(segment), self.chunks(segment));
        let name = |module: &str| format!("layers.{layer}.linear_attn.{module}");
        let bindings = self
            .bind()
            .scratch("qkv", channels, &rows, Access::Read)
            .vector(&name("conv1d"))
            .scratch("b", g.value_heads, &rows, Access::Read)
            .scratch("a", g.value_heads, &rows, Access::Read)
            .vector(&name("A_log"))
            .vector(&name("dt_bias"))
            .position(segment, Access::Read)
            .numbers(&[rows.len()])
            .conv(segment, layer, Access::Read, 2 * key_width * (taps - 1))
            .chunks(&chunks, Access::Write)
            .list;
        let gates = 2 * g.value_heads / g.key_heads * DELTA_CHUNK;
        let memory = vec![CHUNK_PRODUCTS * F32, gates * F32];
        self.launch("prepare_chunks", [chunks.len(), g.key_heads, 1], 256, memory, bindings);
    }

    /// The delta rule over a segment's chunks.
    fn delta_chunks(&mut self, segment: usize, layer: usize) {
        let g = &self.config.gdn;
        let (channels, taps, value_width) = (g.conv_channels(), g.conv_kernel, g.value_width());
        let (rows, chunks, columns) = (self.rows(segment), self.chunks(segment), g.value_dim / LANES);
        let name = |module: &str| format!("layers.{layer}.linear_attn.{module}");
        let bindings = self
            .bind()
            .scratch("qkv", channels, &rows, Access::Read)
            .vector(&name("conv1d"))
            .position(segment, Access::Read)
            .numbers(&[rows.len()])
            .conv(segment, layer, Access::Read, value_width * (taps - 1))
            .chunks(&chunks, Access::Read)
            .recurrent(segment, layer, Access::Read)
            .scratch("gated", value_width, &rows, Access::Write)
            .scratch("squares", g.value_heads * columns, &rows, Access::Write)
            .list;
        let memory = vec![DELTA_CHUNK * LANES * F32];
        let grid = [columns, g.value_heads, 1];
        self.launch("delta_chunks", grid, CHUNKS_SIMDGROUPS * LANES, memory, bindings);
    }

    /// Moves a segment's last inputs into the ring of the convolution, which `delta` does itself if there is only one.
    fn keep_inputs(&mut self, segment: usize, layer: usize) {
        let g = &self.config.gdn;
        let (channels, taps, rows) = (g.conv_channels(), g.conv_kernel, self.rows(segment));
        if rows.len() == 1 {
            return;
        }
        let written = channels * rows.len().min(taps);
        let bindings = self
            .bind()
            .scratch("qkv", channels, &rows, Access::Read)
            .position(segment, Access::Read)
            .numbers(&[rows.len()])
            .conv(segment, layer, Access::Write, written)
            .list;
        self.launch("keep_inputs", [channels.div_ceil(256), 1, 1], 256, Vec::new(), bindings);
    }
}

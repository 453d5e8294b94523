//! Weights on the device.

use std::sync::Arc;

use lily_model::config::{Config, LayerKind};
use lily_model::matrix::Matrix;
use lily_model::weights::{Attention, Expert, Gdn, Layer, Mixer, Moe, Weights};

use crate::driver::{Args, Buffer, Context, DriverError, Shape};
use crate::kernels::Kernels;
use crate::pack::{Packing, RowSource, TILE_COLS, pack, packed_bytes};

/// A packed matrix on the device; several matrices of the same inputs may lie in it one behind the other.
pub struct DeviceMatrix {
    /// Tiles.
    pub tiles: Buffer,
    /// Outputs.
    pub rows: u32,
    /// Tiles of a row.
    pub k_tiles: u32,
    /// Form of the tiles.
    pub packing: Packing,
}

impl DeviceMatrix {
    /// As kernels take it.
    pub fn words(&self) -> [u64; 2] {
        [self.tiles.address(), u64::from(self.rows) | u64::from(self.k_tiles) << 32]
    }
}

/// All weights.
pub struct DeviceWeights {
    /// `[vocab, hidden]`.
    pub embedding: DeviceMatrix,
    /// In order.
    pub layers: Vec<DeviceLayer>,
    /// Gain of the final norm.
    pub norm: Buffer,
    /// `None`: the embedding.
    pub lm_head: Option<DeviceMatrix>,
}

/// One layer.
pub struct DeviceLayer {
    /// Gain before the mixer.
    pub input_norm: Buffer,
    /// Mixes positions.
    pub mixer: DeviceMixer,
    /// Gain before the experts.
    pub post_attention_norm: Buffer,
    /// Mixes channels.
    pub moe: DeviceMoe,
}

/// Mixes positions.
pub enum DeviceMixer {
    /// Gated DeltaNet.
    Gdn {
        /// qkv, z, b, a.
        input: DeviceMatrix,
        /// Weights of the convolution, decay rates, `dt_bias`, gain of the gated norm.
        vectors: [Buffer; 4],
        /// Out projection.
        output: DeviceMatrix,
    },
    /// Gated attention.
    Attention {
        /// Per head query and gate, then k, then v.
        input: DeviceMatrix,
        /// Gains of the norms of queries and keys.
        vectors: [Buffer; 2],
        /// Out projection.
        output: DeviceMatrix,
    },
}

/// Mixture of experts.
pub struct DeviceMoe {
    /// Router, and the shared gate as its last row.
    pub router: DeviceMatrix,
    /// Gate and up of all experts, then of the shared one: 8 rows of gate, the same 8 of up.
    pub gate_up: Stack,
    /// Down of all experts, then of the shared one.
    pub down: Stack,
}

/// Experts' matrices one behind the other, and the shared expert's.
pub struct Stack {
    /// Routed.
    pub experts: Buffer,
    /// Shared.
    pub shared: Buffer,
    /// Form of both.
    pub packing: Packing,
}

impl DeviceWeights {
    /// The matrix that makes logits.
    pub fn lm_head(&self) -> &DeviceMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embedding)
    }

    /// Packs and uploads a checkpoint, matrix by matrix.
    pub fn upload(context: &Arc<Context>, config: &Config, w: &Weights) -> Result<Self, DriverError> {
        let up = Uploader { context };
        let layers = w.layers.iter().map(|layer| up.layer(layer)).collect::<Result<_, _>>()?;
        Ok(Self {
            embedding: up.matrices(&[&w.embedding], "the embedding")?,
            layers,
            norm: up.vector(&w.norm)?,
            lm_head: match config.tie_word_embeddings {
                true => None,
                false => Some(up.matrices(&[&w.lm_head], "lm_head")?),
            },
        })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        let mixer = |m: &DeviceMixer| match m {
            DeviceMixer::Gdn { input, output, .. } | DeviceMixer::Attention { input, output, .. } => {
                input.tiles.bytes() + output.tiles.bytes()
            }
        };
        let stack = |s: &Stack| s.experts.bytes() + s.shared.bytes();
        let layer = |l: &DeviceLayer| {
            mixer(&l.mixer) + l.moe.router.tiles.bytes() + stack(&l.moe.gate_up) + stack(&l.moe.down)
        };
        let head = self.lm_head.as_ref().map_or(0, |m| m.tiles.bytes());
        (self.layers.iter().map(layer).sum::<usize>() + self.embedding.tiles.bytes() + head) as u64
    }
}

struct Uploader<'a> {
    context: &'a Arc<Context>,
}

fn rows_of(m: &Matrix) -> impl Iterator<Item = RowSource<'_>> {
    (0..m.rows).map(move |r| Some((m, r)))
}

/// Rows of gate and up in alternating blocks of eight.
fn interleaved(e: &Expert) -> Vec<RowSource<'_>> {
    let row = |m, r| (r < e.gate.rows).then_some((m, r));
    let block = |b: usize| {
        (0..8).map(move |r| row(&e.gate, b * 8 + r)).chain((0..8).map(move |r| row(&e.up, b * 8 + r)))
    };
    (0..e.gate.rows.div_ceil(8)).flat_map(block).collect()
}

/// Rows of a matrix, padded to whole tiles so that the next expert begins a tile.
fn padded(m: &Matrix) -> Vec<RowSource<'_>> {
    let mut rows: Vec<_> = rows_of(m).collect();
    rows.resize(rows.len().next_multiple_of(crate::pack::TILE_ROWS), None);
    rows
}

impl Uploader<'_> {
    fn vector(&self, values: &[f32]) -> Result<Buffer, DriverError> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.context.upload(&bytes, "weights")
    }

    fn matrices(&self, matrices: &[&Matrix], what: &str) -> Result<DeviceMatrix, DriverError> {
        let packing = Packing::of(matrices.iter().copied());
        let rows: Vec<_> = matrices.iter().flat_map(|m| rows_of(m)).collect();
        let cols = matrices.first().map_or(0, |m| m.cols);
        Ok(DeviceMatrix {
            tiles: self.context.upload(&pack(&rows, cols, packing), what)?,
            rows: rows.len() as u32,
            k_tiles: cols.div_ceil(TILE_COLS) as u32,
            packing,
        })
    }

    fn layer(&self, l: &Layer) -> Result<DeviceLayer, DriverError> {
        Ok(DeviceLayer {
            input_norm: self.vector(&l.input_norm)?,
            mixer: match &l.mixer {
                Mixer::Gdn(w) => self.gdn(w)?,
                Mixer::Attention(w) => self.attention(w)?,
            },
            post_attention_norm: self.vector(&l.post_attention_norm)?,
            moe: self.moe(&l.moe)?,
        })
    }

    fn gdn(&self, w: &Gdn) -> Result<DeviceMixer, DriverError> {
        let input = [&w.in_proj_qkv, &w.in_proj_z, &w.in_proj_b, &w.in_proj_a];
        Ok(DeviceMixer::Gdn {
            input: self.matrices(&input, "weights")?,
            vectors: [
                self.vector(&w.conv)?,
                self.vector(&w.a_log)?,
                self.vector(&w.dt_bias)?,
                self.vector(&w.norm)?,
            ],
            output: self.matrices(&[&w.out_proj], "weights")?,
        })
    }

    fn attention(&self, w: &Attention) -> Result<DeviceMixer, DriverError> {
        Ok(DeviceMixer::Attention {
            input: self.matrices(&[&w.q_proj, &w.k_proj, &w.v_proj], "weights")?,
            vectors: [self.vector(&w.q_norm)?, self.vector(&w.k_norm)?],
            output: self.matrices(&[&w.o_proj], "weights")?,
        })
    }

    fn moe(&self, w: &Moe) -> Result<DeviceMoe, DriverError> {
        let all = || w.experts.iter().chain([&w.shared]);
        let gate_up = Packing::of(all().flat_map(|e| [&e.gate, &e.up]));
        let down = Packing::of(all().map(|e| &e.down));
        Ok(DeviceMoe {
            router: self.matrices(&[&w.router, &w.shared_gate], "weights")?,
            gate_up: self.stack(w, gate_up, interleaved, |e| e.gate.cols)?,
            down: self.stack(w, down, |e| padded(&e.down), |e| e.down.cols)?,
        })
    }

    fn stack<'w>(
        &self,
        w: &'w Moe,
        packing: Packing,
        rows: impl Fn(&'w Expert) -> Vec<RowSource<'w>>,
        cols: impl Fn(&Expert) -> usize,
    ) -> Result<Stack, DriverError> {
        let routed: Vec<_> = w.experts.iter().flat_map(&rows).collect();
        let width = w.experts.first().map_or(0, &cols);
        Ok(Stack {
            experts: self.context.upload(&pack(&routed, width, packing), "experts")?,
            shared: self.context.upload(&pack(&rows(&w.shared), cols(&w.shared), packing), "experts")?,
            packing,
        })
    }
}

/// Makes random weights on the device, in the form of a 4-bit checkpoint: for measuring speed where the real files
/// can't be had. Spreads are those of lily-model's `synth`, the numbers are not.
pub struct Random<'a> {
    /// Where.
    pub context: &'a Arc<Context>,
    /// Has the two kernels that draw.
    pub kernels: &'a Kernels,
    /// Decides every number.
    pub seed: u32,
}

impl Random<'_> {
    /// All weights of a model.
    pub fn weights(&mut self, c: &Config) -> Result<DeviceWeights, DriverError> {
        let (h, q4) = (c.hidden_size, Packing::Q4);
        let layers = c.layers.iter().map(|kind| self.layer(c, *kind)).collect::<Result<_, _>>()?;
        Ok(DeviceWeights {
            embedding: self.matrix(c.vocab_size, h, q4, (h as f32).sqrt())?,
            layers,
            norm: self.floats(h, 1.0, 0.2)?,
            lm_head: Some(self.matrix(c.vocab_size, h, q4, 3.0)?),
        })
    }

    fn layer(&mut self, c: &Config, kind: LayerKind) -> Result<DeviceLayer, DriverError> {
        let (h, g, a, q4) = (c.hidden_size, &c.gdn, &c.attention, Packing::Q4);
        let mixer = match kind {
            LayerKind::Gdn => DeviceMixer::Gdn {
                input: self.matrix(g.conv_channels() + g.value_width() + 2 * g.value_heads, h, q4, 1.0)?,
                vectors: [
                    self.floats(g.conv_channels() * g.conv_kernel, 0.0, 0.5)?,
                    self.floats(g.value_heads, 0.0, 1.0)?,
                    self.floats(g.value_heads, -3.0, 1.0)?,
                    self.floats(g.value_dim, 1.0, 0.2)?,
                ],
                output: self.matrix(h, g.value_width(), q4, 0.35)?,
            },
            LayerKind::Attention => DeviceMixer::Attention {
                input: self.matrix(2 * (a.query_width() + a.kv_width()), h, q4, 1.0)?,
                vectors: [self.floats(a.head_dim, 1.0, 0.2)?, self.floats(a.head_dim, 1.0, 0.2)?],
                output: self.matrix(h, a.query_width(), q4, 0.35)?,
            },
        };
        let m = &c.moe;
        Ok(DeviceLayer {
            input_norm: self.floats(h, 1.0, 0.2)?,
            mixer,
            post_attention_norm: self.floats(h, 1.0, 0.2)?,
            moe: DeviceMoe {
                router: self.matrix(m.experts + 1, h, Packing::Q8, 2.0)?,
                gate_up: Stack {
                    experts: self.matrix(m.experts * 2 * m.expert_width, h, q4, 1.0)?.tiles,
                    shared: self.matrix(2 * m.shared_width, h, q4, 1.0)?.tiles,
                    packing: q4,
                },
                down: Stack {
                    experts: self.matrix(m.experts * h, m.expert_width, q4, 0.35)?.tiles,
                    shared: self.matrix(h, m.shared_width, q4, 0.35)?.tiles,
                    packing: q4,
                },
            },
        })
    }

    /// A matrix whose weights' deviation is `gain / sqrt(cols)`.
    fn matrix(
        &mut self,
        rows: usize,
        cols: usize,
        packing: Packing,
        gain: f32,
    ) -> Result<DeviceMatrix, DriverError> {
        let tiles = self.context.allocate(packed_bytes(rows, cols, packing), "random weights")?;
        let n = tiles.bytes() / packing.tile_bytes();
        let mut args = Args::new();
        args.u64(tiles.address()).u64(n as u64).u32(packing.tile_bytes() as u32);
        args.u32((gain / (cols as f32).sqrt()).to_bits()).u32(self.next_seed());
        self.launch("random_tiles", n, &mut args)?;
        Ok(DeviceMatrix { tiles, rows: rows as u32, k_tiles: cols.div_ceil(TILE_COLS) as u32, packing })
    }

    fn floats(&mut self, n: usize, mean: f32, deviation: f32) -> Result<Buffer, DriverError> {
        let buffer = self.context.allocate(n * 4, "random weights")?;
        let mut args = Args::new();
        args.u64(buffer.address()).u64(n as u64).u32(mean.to_bits()).u32(deviation.to_bits());
        args.u32(self.next_seed());
        self.launch("random_floats", n, &mut args)?;
        Ok(buffer)
    }

    fn launch(&self, name: &str, n: usize, args: &mut Args) -> Result<(), DriverError> {
        let blocks = n.div_ceil(256).clamp(1, 65_535) as u32;
        let shape = Shape { grid: [blocks, 1, 1], threads: 256, shared: 0, overlap: false };
        self.context.launch(self.kernels.get(name)?, shape, args)
    }

    fn next_seed(&mut self) -> u32 {
        self.seed = self.seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        self.seed
    }
}

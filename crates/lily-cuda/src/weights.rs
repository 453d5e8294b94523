//! Weights on the device.

use std::sync::Arc;

use lily_model::config::{Config, LayerKind, MoeConfig};
use lily_model::manifest::mlx_path;
use lily_model::matrix::Matrix;
use lily_model::weights::{Attention, Expert, Gdn, Layer, Mixer, Moe, Weights};

use crate::LoadError;
use crate::driver::{Args, Buffer, Context, DriverError, Shape};
use crate::kernels::Kernels;
use crate::pack::{Packing, RowSource, TILE_COLS, TILE_ROWS, pack, packed_bytes};

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

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        (self.k_tiles as usize * self.packing.tile_bytes() / TILE_ROWS) as u64
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

impl DeviceMixer {
    /// The matrix of the first projection.
    pub fn input(&self) -> &DeviceMatrix {
        match self {
            Self::Gdn { input, .. } | Self::Attention { input, .. } => input,
        }
    }
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

impl Stack {
    /// Bytes that `rows` tokens read if each chooses its experts by chance: the shared one, and of the routed ones those
    /// that are chosen by any.
    pub fn expected_bytes(&self, m: &MoeConfig, rows: u32) -> u64 {
        let (experts, chosen) = (m.experts as f64, m.experts_per_token as f64);
        let met = experts * (1.0 - (1.0 - chosen / experts).powi(rows as i32));
        self.shared.bytes() as u64 + (self.experts.bytes() as f64 / experts * met).round() as u64
    }
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
    rows.resize(rows.len().next_multiple_of(TILE_ROWS), None);
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

/// Makes random weights on the device, in the form that a checkpoint of the config has: for measuring speed where the real
/// files can't be had. Spreads are those of lily-model's `synth`, the numbers are not.
pub struct Random<'a> {
    /// Where.
    pub context: &'a Arc<Context>,
    /// Has the two kernels that draw.
    pub kernels: &'a Kernels,
    /// Shapes and forms.
    pub config: &'a Config,
    /// Decides every number.
    pub seed: u32,
}

impl Random<'_> {
    /// All weights of the model.
    pub fn weights(&mut self) -> Result<DeviceWeights, LoadError> {
        let c = self.config;
        let h = c.hidden_size;
        let layers =
            c.layers.iter().enumerate().map(|(i, kind)| self.layer(i, *kind)).collect::<Result<_, _>>()?;
        Ok(DeviceWeights {
            embedding: self.matrix(c.vocab_size, h, self.form("", &["embed_tokens"])?, (h as f32).sqrt())?,
            layers,
            norm: self.floats(h, 1.0, 0.2)?,
            lm_head: match c.tie_word_embeddings {
                true => None,
                false => Some(self.matrix(c.vocab_size, h, self.form("", &["lm_head"])?, 3.0)?),
            },
        })
    }

    fn layer(&mut self, i: usize, kind: LayerKind) -> Result<DeviceLayer, LoadError> {
        let h = self.config.hidden_size;
        Ok(DeviceLayer {
            input_norm: self.floats(h, 1.0, 0.2)?,
            mixer: match kind {
                LayerKind::Gdn => self.gdn(&format!("layers.{i}.linear_attn."))?,
                LayerKind::Attention => self.attention(&format!("layers.{i}.self_attn."))?,
            },
            post_attention_norm: self.floats(h, 1.0, 0.2)?,
            moe: self.moe(&format!("layers.{i}.mlp."))?,
        })
    }

    fn gdn(&mut self, path: &str) -> Result<DeviceMixer, LoadError> {
        let (h, g) = (self.config.hidden_size, &self.config.gdn);
        let input = self.form(path, &["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"])?;
        Ok(DeviceMixer::Gdn {
            input: self.matrix(g.conv_channels() + g.value_width() + 2 * g.value_heads, h, input, 1.0)?,
            vectors: [
                self.floats(g.conv_channels() * g.conv_kernel, 0.0, 0.5)?,
                self.floats(g.value_heads, 0.0, 1.0)?,
                self.floats(g.value_heads, -3.0, 1.0)?,
                self.floats(g.value_dim, 1.0, 0.2)?,
            ],
            output: self.matrix(h, g.value_width(), self.form(path, &["out_proj"])?, 0.35)?,
        })
    }

    fn attention(&mut self, path: &str) -> Result<DeviceMixer, LoadError> {
        let (h, a) = (self.config.hidden_size, &self.config.attention);
        let input = self.form(path, &["q_proj", "k_proj", "v_proj"])?;
        Ok(DeviceMixer::Attention {
            input: self.matrix(2 * (a.query_width() + a.kv_width()), h, input, 1.0)?,
            vectors: [self.floats(a.head_dim, 1.0, 0.2)?, self.floats(a.head_dim, 1.0, 0.2)?],
            output: self.matrix(h, a.query_width(), self.form(path, &["o_proj"])?, 0.35)?,
        })
    }

    fn moe(&mut self, path: &str) -> Result<DeviceMoe, LoadError> {
        let (h, m) = (self.config.hidden_size, &self.config.moe);
        let router = self.form(path, &["gate", "shared_expert_gate"])?;
        let [gate, up] = ["gate_proj", "up_proj"];
        let gate_up =
            ["switch_mlp.", "shared_expert."].map(|of| self.form(&format!("{path}{of}"), &[gate, up]));
        let down = self.form(path, &["switch_mlp.down_proj", "shared_expert.down_proj"])?;
        let [routed, shared] = gate_up;
        let gate_up = Packing::common([routed?, shared?]);
        Ok(DeviceMoe {
            router: self.matrix(m.experts + 1, h, router, 2.0)?,
            gate_up: Stack {
                experts: self.matrix(m.experts * 2 * m.expert_width, h, gate_up, 1.0)?.tiles,
                shared: self.matrix(2 * m.shared_width, h, gate_up, 1.0)?.tiles,
                packing: gate_up,
            },
            down: Stack {
                experts: self.matrix(m.experts * h, m.expert_width, down, 0.35)?.tiles,
                shared: self.matrix(h, m.shared_width, down, 0.35)?.tiles,
                packing: down,
            },
        })
    }

    /// Form of modules that lie one behind the other, in a checkpoint of the config.
    fn form(&self, path: &str, names: &[&str]) -> Result<Packing, LoadError> {
        let form = |name: &&str| {
            let quantization = self.config.quantization.as_ref();
            Packing::of_form(quantization.and_then(|q| q.of(&mlx_path(&format!("{path}{name}")))), true)
        };
        let packing = Packing::common(names.iter().map(form));
        let drawn = matches!(packing, Packing::Q4 | Packing::Q8);
        match drawn || self.context.is_stand_in() {
            true => Ok(packing),
            false => Err(LoadError::Random { module: format!("{path}{}", names[0]) }),
        }
    }

    /// A matrix whose weights' deviation is `gain / sqrt(cols)`.
    fn matrix(
        &mut self,
        rows: usize,
        cols: usize,
        packing: Packing,
        gain: f32,
    ) -> Result<DeviceMatrix, LoadError> {
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

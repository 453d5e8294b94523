//! Random models of any shape, in any of the stored forms.

use lily_model::config::{Affine, AttentionConfig, Config, GdnConfig, LayerKind, MoeConfig};
use lily_model::files::Bytes;
use lily_model::matrix::{FloatType, Floats, Form, Matrix};
use lily_model::weights::{Attention, Expert, Gdn, Layer, Mixer, Moe, Weights};

use super::Model;

/// How matrices are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stored {
    /// 4-bit codes, groups of 64; routers 8-bit.
    Quantised,
    /// As `Quantised` with groups of 32, of 128, 8 bits, f32, f16 and bf16 at random.
    Mixed,
}

/// SplitMix64.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From -1 to 1.
    pub fn real(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn reals(&mut self, n: usize, centre: f32, spread: f32) -> Vec<f32> {
        (0..n).map(|_| centre + spread * self.real()).collect()
    }

    fn floats(&mut self, n: usize, spread: f32, dtype: FloatType) -> Floats {
        let values = self.reals(n, 0.0, spread);
        let data = values.iter().flat_map(|x| match dtype {
            FloatType::F32 => x.to_le_bytes().to_vec(),
            FloatType::F16 => half::f16::from_f32(*x).to_le_bytes().to_vec(),
            FloatType::Bf16 => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
        });
        Floats { dtype, data: Bytes::new(data.collect::<Vec<u8>>()) }
    }

    pub fn affine(&mut self, rows: usize, cols: usize, affine: Affine, gain: f32) -> Matrix {
        let scale = gain / (cols as f32).sqrt();
        let codes: Vec<u8> = (0..rows * cols * affine.bits / 8).map(|_| self.next() as u8).collect();
        let groups = rows * cols / affine.group_size;
        let step = scale / (1 << (affine.bits - 1)) as f32;
        let scales = self.floats(groups, step, FloatType::Bf16);
        let biases = self.floats(groups, scale, FloatType::Bf16);
        Matrix { rows, cols, form: Form::Affine { affine, codes: Bytes::new(codes), scales, biases } }
    }

    fn matrix(&mut self, rows: usize, cols: usize, stored: Stored, bits: usize, gain: f32) -> Matrix {
        if stored == Stored::Quantised {
            return self.affine(rows, cols, Affine { bits, group_size: 64 }, gain);
        }
        let group_size = [32, 64, 128][self.next() as usize % 3];
        if cols.is_multiple_of(group_size) && !self.next().is_multiple_of(3) {
            let bits = [4, 8][self.next() as usize % 2];
            return self.affine(rows, cols, Affine { bits, group_size }, gain);
        }
        let dtype = [FloatType::F32, FloatType::F16, FloatType::Bf16][self.next() as usize % 3];
        let values = self.floats(rows * cols, gain / (cols as f32).sqrt(), dtype);
        Matrix { rows, cols, form: Form::Dense(values) }
    }
}

/// A small config with everything odd that the kernels allow.
pub fn config(layers: &[LayerKind]) -> Config {
    Config {
        hidden_size: 192,
        vocab_size: 333,
        max_context: 4096,
        rms_norm_eps: 1e-6,
        layers: layers.to_vec(),
        gdn: GdnConfig { key_heads: 2, value_heads: 6, key_dim: 96, value_dim: 64, conv_kernel: 4 },
        attention: AttentionConfig { heads: 6, kv_heads: 2, head_dim: 64, rotary_dim: 32, rope_theta: 1e7 },
        moe: MoeConfig { experts: 37, experts_per_token: 5, expert_width: 64, shared_width: 128 },
        tie_word_embeddings: false,
        quantization: None,
        eos_token_ids: vec![],
    }
}

/// The same with value heads of 128, for which steps of four sequences and more have a kernel of their own.
pub fn whole_heads(layers: &[LayerKind]) -> Config {
    let mut config = config(layers);
    config.gdn.value_dim = 128;
    config
}

/// The same with one expert a token, out of more than the kernels rank by counting (`CANDIDATES`) if all are equal.
pub fn one_expert(layers: &[LayerKind]) -> Config {
    let mut config = config(layers);
    config.moe.experts_per_token = 1;
    config.moe.experts = 70;
    config
}

/// The same with the heads and the context of the real model.
pub fn real_attention(layers: &[LayerKind]) -> Config {
    let mut config = config(layers);
    config.max_context = 262_144;
    config.attention =
        AttentionConfig { heads: 16, kv_heads: 2, head_dim: 256, rotary_dim: 64, rope_theta: 1e7 };
    config
}

/// A matrix of 4- or 8-bit codes that are all worth nothing.
pub fn zeros(rows: usize, cols: usize, bits: usize) -> Matrix {
    Numbers(0).affine(rows, cols, Affine { bits, group_size: 64 }, 0.0)
}

/// Multiplies rows of a quantised matrix by a power of two, which bf16 scales take without rounding.
pub fn scale_rows(m: &mut Matrix, rows: std::ops::Range<usize>, factor: f32) {
    let cols = m.cols;
    let Form::Affine { affine, scales, biases, .. } = &mut m.form else {
        panic!("the matrix is not quantised")
    };
    let groups = cols / affine.group_size;
    for floats in [scales, biases] {
        let mut values = floats.to_vec();
        values[rows.start * groups..rows.end * groups].iter_mut().for_each(|x| *x *= factor);
        let data = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect::<Vec<u8>>();
        *floats = Floats { dtype: FloatType::Bf16, data: Bytes::new(data) };
    }
}

/// Random weights.
pub fn model(c: Config, seed: u64, stored: Stored) -> Model {
    let n = &mut Numbers(seed);
    let h = c.hidden_size;
    let layers = c.layers.iter().map(|kind| Layer {
        input_norm: n.reals(h, 1.0, 0.3),
        mixer: match kind {
            LayerKind::Gdn => Mixer::Gdn(Gdn {
                in_proj_qkv: n.matrix(c.gdn.conv_channels(), h, stored, 4, 1.0),
                in_proj_z: n.matrix(c.gdn.value_width(), h, stored, 4, 1.0),
                in_proj_b: n.matrix(c.gdn.value_heads, h, stored, 4, 1.0),
                in_proj_a: n.matrix(c.gdn.value_heads, h, stored, 4, 1.0),
                conv: n.reals(c.gdn.conv_channels() * c.gdn.conv_kernel, 0.0, 1.0),
                a_log: n.reals(c.gdn.value_heads, 0.0, 3.0),
                dt_bias: n.reals(c.gdn.value_heads, -2.0, 4.0),
                norm: n.reals(c.gdn.value_dim, 1.0, 0.3),
                out_proj: n.matrix(h, c.gdn.value_width(), stored, 4, 0.5),
            }),
            LayerKind::Attention => Mixer::Attention(Attention {
                q_proj: n.matrix(2 * c.attention.query_width(), h, stored, 4, 1.0),
                k_proj: n.matrix(c.attention.kv_width(), h, stored, 4, 1.0),
                v_proj: n.matrix(c.attention.kv_width(), h, stored, 4, 1.0),
                o_proj: n.matrix(h, c.attention.query_width(), stored, 4, 0.5),
                q_norm: n.reals(c.attention.head_dim, 1.0, 0.3),
                k_norm: n.reals(c.attention.head_dim, 1.0, 0.3),
            }),
        },
        post_attention_norm: n.reals(h, 1.0, 0.3),
        moe: Moe {
            router: n.matrix(c.moe.experts, h, stored, 8, 3.0),
            experts: (0..c.moe.experts).map(|_| expert(n, c.moe.expert_width, h, stored)).collect(),
            shared: expert(n, c.moe.shared_width, h, stored),
            shared_gate: n.matrix(1, h, stored, 8, 1.0),
        },
    });
    let layers = layers.collect();
    let weights = Weights {
        embedding: n.matrix(c.vocab_size, h, stored, 4, (h as f32).sqrt()),
        layers,
        norm: n.reals(h, 1.0, 0.3),
        lm_head: n.matrix(c.vocab_size, h, stored, 4, 3.0),
    };
    Model { config: c, weights }
}

fn expert(n: &mut Numbers, width: usize, hidden: usize, stored: Stored) -> Expert {
    Expert {
        gate: n.matrix(width, hidden, stored, 4, 1.0),
        up: n.matrix(width, hidden, stored, 4, 1.0),
        down: n.matrix(hidden, width, stored, 4, 0.5),
    }
}

//! The fast path against the reference on shapes and values that the fixture doesn't have.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::sync::Arc;

use common::{feed, load, max_difference};
use lily_cpu::reference::{Reference, State};
use lily_cpu::tap::no_tap;
use lily_cpu::{CpuBackend, Isa, Options};
use lily_model::backend::Backend;
use lily_model::config::{Affine, AttentionConfig, Config, GdnConfig, LayerKind, MoeConfig};
use lily_model::files::Bytes;
use lily_model::matrix::{FloatType, Floats, Form, Matrix};
use lily_model::weights::{Attention, Expert, Gdn, Layer, Mixer, Moe, Weights};
use proptest::prelude::*;

/// A seeded stream of numbers for weights.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From -1 to 1.
    fn real(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn reals(&mut self, n: usize, centre: f32, spread: f32) -> Vec<f32> {
        (0..n).map(|_| centre + spread * self.real()).collect()
    }

    fn floats(&mut self, n: usize, spread: f32) -> Floats {
        let values = self.reals(n, 0.0, spread);
        match self.next() % 3 {
            0 => Floats { dtype: FloatType::F32, data: bytes(&values, |x| x.to_le_bytes().to_vec()) },
            1 => Floats {
                dtype: FloatType::F16,
                data: bytes(&values, |x| half::f16::from_f32(*x).to_le_bytes().to_vec()),
            },
            _ => Floats {
                dtype: FloatType::Bf16,
                data: bytes(&values, |x| half::bf16::from_f32(*x).to_le_bytes().to_vec()),
            },
        }
    }

    /// A matrix in any of the stored forms that its width allows.
    fn matrix(&mut self, rows: usize, cols: usize) -> Matrix {
        let scale = 1.0 / (cols as f32).sqrt();
        let affine = Affine {
            bits: [4, 8][self.next() as usize % 2],
            group_size: [32, 64, 128][self.next() as usize % 3],
        };
        if !cols.is_multiple_of(affine.group_size) || self.next().is_multiple_of(4) {
            return Matrix { rows, cols, form: Form::Dense(self.floats(rows * cols, scale)) };
        }
        let codes: Vec<u8> = (0..rows * cols * affine.bits / 8).map(|_| self.next() as u8).collect();
        let groups = rows * cols / affine.group_size;
        let step = scale / (1 << (affine.bits - 1)) as f32;
        let (scales, biases) = (self.floats(groups, step), self.floats(groups, scale));
        Matrix { rows, cols, form: Form::Affine { affine, codes: Bytes::new(codes), scales, biases } }
    }

    fn expert(&mut self, width: usize, hidden: usize) -> Expert {
        Expert {
            gate: self.matrix(width, hidden),
            up: self.matrix(width, hidden),
            down: self.matrix(hidden, width),
        }
    }
}

fn bytes(values: &[f32], of: impl Fn(&f32) -> Vec<u8>) -> Bytes {
    Bytes::new(values.iter().flat_map(of).collect::<Vec<u8>>())
}

fn weights(c: &Config, seed: u64) -> Weights {
    let mut n = Numbers(seed);
    let h = c.hidden_size;
    let layers = c.layers.iter().map(|kind| Layer {
        input_norm: n.reals(h, 1.0, 0.3),
        mixer: match kind {
            LayerKind::Gdn => Mixer::Gdn(Gdn {
                in_proj_qkv: n.matrix(c.gdn.conv_channels(), h),
                in_proj_z: n.matrix(c.gdn.value_width(), h),
                in_proj_b: n.matrix(c.gdn.value_heads, h),
                in_proj_a: n.matrix(c.gdn.value_heads, h),
                conv: n.reals(c.gdn.conv_channels() * c.gdn.conv_kernel, 0.0, 1.0),
                a_log: n.reals(c.gdn.value_heads, 0.0, 3.0),
                dt_bias: n.reals(c.gdn.value_heads, -2.0, 4.0),
                norm: n.reals(c.gdn.value_dim, 1.0, 0.3),
                out_proj: n.matrix(h, c.gdn.value_width()),
            }),
            LayerKind::Attention => Mixer::Attention(Attention {
                q_proj: n.matrix(2 * c.attention.query_width(), h),
                k_proj: n.matrix(c.attention.kv_width(), h),
                v_proj: n.matrix(c.attention.kv_width(), h),
                o_proj: n.matrix(h, c.attention.query_width()),
                q_norm: n.reals(c.attention.head_dim, 1.0, 0.3),
                k_norm: n.reals(c.attention.head_dim, 1.0, 0.3),
            }),
        },
        post_attention_norm: n.reals(h, 1.0, 0.3),
        moe: Moe {
            router: n.matrix(c.moe.experts, h),
            experts: (0..c.moe.experts).map(|_| n.expert(c.moe.expert_width, h)).collect(),
            shared: n.expert(c.moe.shared_width, h),
            shared_gate: n.matrix(1, h),
        },
    });
    let layers = layers.collect();
    Weights {
        embedding: n.matrix(c.vocab_size, h),
        layers,
        norm: n.reals(h, 1.0, 0.3),
        lm_head: n.matrix(c.vocab_size, h),
    }
}

/// Odd sizes on purpose: heads, widths and vocabularies that are no multiple of anything a kernel likes.
fn config() -> impl Strategy<Value = Config> {
    (
        prop::sample::select(vec![32usize, 64, 96, 128, 50]),
        (
            1usize..3,
            1usize..4,
            prop::sample::select(vec![4usize, 16, 33]),
            prop::sample::select(vec![8usize, 31, 32]),
            2usize..6,
        ),
        (1usize..3, 1usize..4, prop::sample::select(vec![8usize, 18, 32, 64])),
        (1usize..6, prop::sample::select(vec![5usize, 32, 64])),
        5usize..40,
    )
        .prop_map(|(hidden_size, gdn, attention, moe, vocab_size)| Config {
            hidden_size,
            vocab_size,
            max_context: 512,
            rms_norm_eps: 1e-6,
            layers: vec![LayerKind::Gdn, LayerKind::Attention],
            gdn: GdnConfig {
                key_heads: gdn.0,
                value_heads: gdn.0 * gdn.1,
                key_dim: gdn.2,
                value_dim: gdn.3,
                conv_kernel: gdn.4,
            },
            attention: AttentionConfig {
                heads: attention.0 * attention.1,
                kv_heads: attention.0,
                head_dim: attention.2,
                rotary_dim: attention.2 / 4 * 2,
                rope_theta: 1e7,
            },
            moe: MoeConfig {
                experts: moe.0,
                experts_per_token: moe.0.div_ceil(2),
                expert_width: moe.1,
                shared_width: moe.1,
            },
            tie_word_embeddings: false,
            quantization: None,
            eos_token_ids: Vec::new(),
        })
}

fn reference(config: &Config, weights: &Weights, ids: &[u32]) -> Vec<Vec<f32>> {
    let reference = Reference { config, weights };
    let mut state = State::default();
    ids.iter().map(|&id| reference.logits(&reference.step(id, &mut state, &mut no_tap))).collect()
}

fn fast(config: &Config, weights: Arc<Weights>, ids: &[u32], isa: Isa) -> Vec<Vec<f32>> {
    let options = Options { threads: Some(2), context: 512, isa, exact: true, ..Options::default() };
    let mut backend = CpuBackend::new(config.clone(), weights, &options).unwrap();
    let seq = backend.create(ids.len() as u32).unwrap();
    feed(&mut backend, seq, 0, ids)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Every instruction set, any shape, any stored form, one token or many. A random model may be chaotic:
    /// the router's choice can flip on a tie. Agreement is demanded relative to the size of the logits.
    #[test]
    fn any_shape_equals_the_reference(c in config(), seed: u64, tokens in 1usize..100) {
        let weights = Arc::new(weights(&c, seed));
        let ids: Vec<u32> = (0..tokens).map(|i| (i * i + 3) as u32 % c.vocab_size as u32).collect();
        let expected = reference(&c, &weights, &ids).concat();
        let size = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
        for isa in Isa::available() {
            let got = fast(&c, weights.clone(), &ids, isa).concat();
            let d = max_difference(&got, &expected) / size;
            prop_assert!(d < 1e-3, "{isa:?}: relative difference {d:e}");
        }
    }
}

/// All tokens on one expert: the router's other rows can't win.
#[test]
fn all_tokens_on_one_expert() {
    let mut model = load("q4");
    let w = Arc::get_mut(&mut model.weights).unwrap();
    model.config.moe.experts_per_token = 1;
    for layer in &mut w.layers {
        let experts = layer.moe.router.rows;
        let zero = vec![0u8; experts * layer.moe.router.cols * 4];
        layer.moe.router.form = Form::Dense(Floats { dtype: FloatType::F32, data: Bytes::new(zero) });
    }
    let ids: Vec<u32> = (0..65).collect();
    let expected = reference(&model.config, &model.weights, &ids).concat();
    let got = fast(&model.config, model.weights.clone(), &ids, Isa::detect()).concat();
    common::assert_close("one expert", &got, &expected);
}

/// Scales far from 1 pass through every kernel without loss.
#[test]
fn extreme_scales() {
    for factor in [1e-12f32, 1e12] {
        let mut model = load("dense");
        let w = Arc::get_mut(&mut model.weights).unwrap();
        for layer in &mut w.layers {
            // The mixers' outputs are normed before they meet anything else, so only their size changes.
            if let Mixer::Gdn(gdn) = &mut layer.mixer {
                gdn.conv.iter_mut().for_each(|x| *x *= factor);
            }
        }
        let ids: Vec<u32> = (0..65).collect();
        let expected = reference(&model.config, &model.weights, &ids).concat();
        let got = fast(&model.config, model.weights.clone(), &ids, Isa::detect()).concat();
        common::assert_close(&format!("factor {factor:e}"), &got, &expected);
    }
}

//! The kernels' text, for the shapes of a model.

use std::fmt::Write;

use lily_model::config::Config;

use crate::plan::{Features, KvType, PAGE, PARTS, SETTLE_EVERY, bits};

/// The files of `kernels/`, in the order in which they make one library.
const FILES: [&str; 11] = [
    include_str!("../kernels/common.metal"),
    include_str!("../kernels/embed.metal"),
    include_str!("../kernels/matmul.metal"),
    include_str!("../kernels/gdn.metal"),
    include_str!("../kernels/delta_chunks.metal"),
    include_str!("../kernels/attention.metal"),
    include_str!("../kernels/attend_rows.metal"),
    include_str!("../kernels/moe.metal"),
    include_str!("../kernels/experts.metal"),
    include_str!("../kernels/sample.metal"),
    include_str!("../kernels/head.metal"),
];

/// Those that are added for tensor operations.
const TENSOR_FILES: [&str; 2] =
    [include_str!("../kernels/tensor_matmul.metal"), include_str!("../kernels/tensor_experts.metal")];

/// And if K/V has 16 bits.
const TENSOR_ATTENTION: &str = include_str!("../kernels/tensor_attention.metal");

/// Headers of tensor operations. Before anything of ours, whose macros they must not meet.
const TENSOR_HEADERS: &str = "#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
";

/// A version of the Metal Shading Language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// 3.1, of macOS 14.
    V3_1,
    /// 4.0, of macOS 26.
    V4_0,
}

impl From<Features> for Language {
    fn from(features: Features) -> Self {
        if features.tensor { Self::V4_0 } else { Self::V3_1 }
    }
}

/// One library with all kernels, compiled for the shapes of `config`, in the [`Language`] of the features. To be compiled with
/// `MTLMathMode.safe`: the kernels use infinities and tell NaN apart.
pub fn source(config: &Config, features: impl Into<Features>) -> String {
    let features = features.into();
    let (g, a, m) = (&config.gdn, &config.attention, &config.moe);
    let shapes = [
        ("MATRIX_BITS", bits(config).matrices),
        ("ROUTER_BITS", bits(config).routers),
        ("HIDDEN", config.hidden_size),
        ("VOCAB", config.vocab_size),
        ("KEY_HEADS", g.key_heads),
        ("VALUE_HEADS", g.value_heads),
        ("KEY_DIM", g.key_dim),
        ("VALUE_DIM", g.value_dim),
        ("TAPS", g.conv_kernel),
        ("SETTLE_EVERY", SETTLE_EVERY),
        ("HEADS", a.heads),
        ("KV_HEADS", a.kv_heads),
        ("HEAD_DIM", a.head_dim),
        ("ROTARY_DIM", a.rotary_dim),
        ("PARTS", PARTS),
        ("PAGE", PAGE),
        ("EXPERTS", m.experts),
        ("TOP_K", m.experts_per_token),
        ("EXPERT_WIDTH", m.expert_width),
        ("SHARED_WIDTH", m.shared_width),
    ];
    let mut text = if features.tensor { TENSOR_HEADERS.to_owned() } else { String::new() };
    for (name, value) in shapes {
        // Unsigned, like everything that they are compared with. Writing to a String can't fail.
        let _ = writeln!(text, "#define {name} {value}u");
    }
    let _ = writeln!(text, "#define NORM_EPS {:e}f\n#define KV {}", config.rms_norm_eps, features.kv.metal());
    FILES.iter().for_each(|file| text.push_str(file));
    if features.tensor {
        TENSOR_FILES.iter().for_each(|file| text.push_str(file));
        if features.kv == KvType::Bf16 {
            text.push_str(TENSOR_ATTENTION);
        }
    }
    text
}

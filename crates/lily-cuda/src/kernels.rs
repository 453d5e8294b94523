//! The kernels: their files, the shapes they are compiled for, and the loaded functions.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use lily_model::config::Config;

use crate::LoadError;
use crate::compile::{Compiler, cubin};
use crate::driver::{Context, DriverError, Function, Module};
use crate::gdn;

/// A file of kernels; [`COMMON`] goes before each.
pub struct Source {
    /// For messages and the cache.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// Kernels in it.
    pub kernels: &'static [&'static str],
    /// Whether it is compiled for a model and a compute capability (90 is 9.0).
    pub fits: fn(&Config, u32) -> bool,
}

/// Of files that every model needs.
const ALL: fn(&Config, u32) -> bool = |_, _| true;

/// What every file starts with.
pub const COMMON: [&str; 4] = [
    include_str!("../kernels/ptx.cu"),
    include_str!("../kernels/common.cu"),
    include_str!("../kernels/hopper.cu"),
    include_str!("../kernels/state.cu"),
];

/// All files.
pub const SOURCES: [Source; 12] = [
    Source {
        name: "embed.cu",
        text: include_str!("../kernels/embed.cu"),
        kernels: &["embed_q4", "embed_q8", "embed_bf16", "embed_bf16x2"],
        fits: ALL,
    },
    Source {
        name: "matmul.cu",
        text: include_str!("../kernels/matmul.cu"),
        kernels: &[
            "prepare_plain",
            "prepare_norm",
            "prepare_heads",
            "matmul_q4_1x1",
            "matmul_q4_4x1",
            "matmul_q4_1x2",
            "matmul_q4_2x2",
            "matmul_q4_1x4",
            "matmul_q4_4x4",
            "matmul_q8_1x1",
            "matmul_q8_4x1",
            "matmul_q8_1x2",
            "matmul_q8_2x2",
            "matmul_q8_1x4",
            "matmul_q8_4x4",
            "matmul_bf16_1x1",
            "matmul_bf16_4x1",
            "matmul_bf16_1x2",
            "matmul_bf16_2x2",
            "matmul_bf16_1x4",
            "matmul_bf16_4x4",
            "matmul_bf16x2_1x1",
            "matmul_bf16x2_4x1",
            "matmul_bf16x2_1x2",
            "matmul_bf16x2_2x2",
            "matmul_bf16x2_1x4",
            "matmul_bf16x2_4x4",
        ],
        fits: ALL,
    },
    Source {
        name: "cluster.cu",
        text: include_str!("../kernels/cluster.cu"),
        kernels: &["product_q8_8", "product_q8_32", "router_q8"],
        fits: ALL,
    },
    Source {
        name: "wide.cu",
        text: concat!(include_str!("../kernels/warpgroup.cu"), include_str!("../kernels/wide.cu")),
        kernels: &[
            "wide_8_by_2",
            "wide_16_by_2",
            "wide_32_by_2",
            "wide_32_by_4",
            "columns_plain",
            "columns_norm",
            "columns_heads",
        ],
        fits: ALL,
    },
    Source {
        name: "chunk.cu",
        text: concat!(include_str!("../kernels/warpgroup.cu"), include_str!("../kernels/chunk.cu")),
        kernels: &["chunk_q4", "chunk_gather", "chunk_gate_up_q4", "chunk_columns", "chunk_down_q4"],
        fits: crate::chunk::fits,
    },
    Source {
        name: "gdn.cu",
        text: concat!(include_str!("../kernels/gdn.cu"), include_str!("../kernels/gdn_chunk.cu")),
        kernels: &["delta_1", "delta_4", "settle", "delta_inputs", "delta_chunk", "delta_outputs"],
        fits: ALL,
    },
    Source {
        name: "attention.cu",
        text: include_str!("../kernels/attention.cu"),
        kernels: &["rotary_table", "append", "flash", "flash_rows", "combine"],
        fits: ALL,
    },
    Source {
        name: "moe.cu",
        text: include_str!("../kernels/moe.cu"),
        kernels: &[
            "route",
            "list_experts",
            "add_experts",
            "gate_up_q4",
            "gate_up_q8",
            "gate_up_bf16",
            "gate_up_bf16x2",
            "down_q4",
            "down_q8",
            "down_bf16",
            "down_bf16x2",
        ],
        fits: ALL,
    },
    Source {
        name: "group.cu",
        text: include_str!("../kernels/group.cu"),
        kernels: &["experts_group_q4"],
        fits: |_, capability| capability >= crate::group::CAPABILITY,
    },
    Source {
        name: "head.cu",
        text: include_str!("../kernels/head.cu"),
        kernels: &["gather", "bests", "finish"],
        fits: ALL,
    },
    Source {
        name: "token.cu",
        text: concat!(
            include_str!("../kernels/token/layout.cu"),
            include_str!("../kernels/token/producer.cu"),
            include_str!("../kernels/token/block.cu"),
            include_str!("../kernels/token/delta.cu"),
            include_str!("../kernels/token/attention.cu"),
            include_str!("../kernels/token/experts.cu"),
            include_str!("../kernels/token/token.cu"),
        ),
        kernels: &["token"],
        fits: crate::token::fits,
    },
    Source {
        name: "synth.cu",
        text: include_str!("../kernels/synth.cu"),
        kernels: &["random_tiles", "random_floats"],
        fits: ALL,
    },
];

/// Kernels that may touch local memory, and how many bytes of it a thread has at most: what runs once at load.
pub const LOCAL_MEMORY: [(&str, u32); 1] = [("rotary_table", 128)];

impl Source {
    /// The whole text of the file.
    pub fn full_text(&self) -> String {
        COMMON.concat() + self.text
    }
}

/// `sm_90a` for Hopper, whose own instructions need the suffix; `sm_80` and the like otherwise.
pub fn architecture(capability: u32) -> String {
    match capability {
        90 => "sm_90a".to_owned(),
        other => format!("sm_{other}"),
    }
}

/// Options of the compiler for a model and an architecture: its shapes as macros, and what the host counts too.
pub fn options(config: &Config, arch: &str) -> Vec<String> {
    let (g, a, m) = (&config.gdn, &config.attention, &config.moe);
    let shapes = [
        ("HIDDEN", config.hidden_size),
        ("VOCAB", config.vocab_size),
        ("KEY_HEADS", g.key_heads),
        ("VALUE_HEADS", g.value_heads),
        ("DK", g.key_dim),
        ("DV", g.value_dim),
        ("TAPS", g.conv_kernel),
        ("HEADS", a.heads),
        ("KV_HEADS", a.kv_heads),
        ("HEAD_DIM", a.head_dim),
        ("ROTARY", a.rotary_dim),
        ("EXPERTS", m.experts),
        ("TOP_K", m.experts_per_token),
        ("EXPERT_WIDTH", m.expert_width),
        ("SHARED_WIDTH", m.shared_width),
        ("PENDING", gdn::PENDING),
        ("CHUNK_ROWS", gdn::CHUNK_ROWS),
    ];
    let fixed = [
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
        format!("-DEPS={:e}f", config.rms_norm_eps),
        "-DINFINITY=__int_as_float(0x7f800000)".to_owned(),
    ];
    fixed.into_iter().chain(shapes.map(|(name, value)| format!("-D{name}={value}"))).collect()
}

/// Loaded kernels by name.
pub struct Kernels {
    functions: HashMap<&'static str, Function>,
    /// By name of the file. They own the code that `functions` point into.
    modules: HashMap<&'static str, Module>,
}

impl Kernels {
    /// Compiles or fetches all files and loads them. `shared`: kernels that use dynamic shared memory, and how much.
    pub fn load(
        context: &Arc<Context>,
        config: &Config,
        cache: Option<&Path>,
        shared: &[(&str, u32)],
    ) -> Result<Self, LoadError> {
        let compiler = Compiler::load();
        let options = options(config, &architecture(context.capability));
        let (mut functions, mut modules) = (HashMap::new(), HashMap::new());
        for source in SOURCES.iter().filter(|s| (s.fits)(config, context.capability)) {
            let code = cubin(compiler.as_ref(), cache, source.name, &source.full_text(), &options)?;
            let module = Module::load(context, &code)?;
            for &name in source.kernels {
                let bytes = shared.iter().find(|(n, _)| *n == name).map_or(0, |(_, bytes)| *bytes);
                functions.insert(name, module.function(name, bytes)?);
            }
            modules.insert(source.name, module);
        }
        Ok(Self { functions, modules })
    }

    /// Numbers that `file` defines under a name, for the host.
    pub fn numbers<const N: usize>(&self, file: &str, name: &str) -> Result<[u32; N], DriverError> {
        let missing = || DriverError::Call { call: "number lookup", name: name.to_owned() };
        self.modules.get(file).ok_or_else(missing)?.numbers(name)
    }

    /// Names without code, for a stand-in of a device.
    pub fn names() -> Self {
        let names = SOURCES.iter().flat_map(|source| source.kernels);
        Self { functions: names.map(|&name| (name, Function::NONE)).collect(), modules: HashMap::new() }
    }

    /// A kernel.
    pub fn get(&self, name: &str) -> Result<Function, DriverError> {
        let missing = || DriverError::Call { call: "kernel lookup", name: name.to_owned() };
        self.functions.get(name).copied().ok_or_else(missing)
    }
}

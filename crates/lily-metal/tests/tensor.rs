//! Which kernels a device gets: those with tensor operations, or those that every device runs.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use common::device::{ShimDevice, Spoil};
use common::model::{Model, folder, unquantised};
use lily_metal::device::DeviceError;
use lily_metal::plan::{Features, KvType};
use lily_metal::selftest::{run, run_source};
use lily_metal::{MetalBackend, Options, source};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const TENSOR: Features = Features { kv: KvType::Bf16, tensor: true };

fn nano() -> Model {
    Model::load(&folder("tests/data/nano/mlx-4bit"))
}

/// Collects what is logged from level `info` on.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(Level, String)>>>);

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap().push((*event.metadata().level(), message.0));
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Loads a model on a device; which kernels it got, warnings about them, and the line that says so.
fn load(device: ShimDevice, tensor: bool) -> (Features, Vec<String>, String) {
    let model = nano();
    let options = Options {
        context: 128,
        max_batch_tokens: 64,
        max_sequences: 2,
        tensor,
        aligned_copies: false,
        ..Options::default()
    };
    let log = Log::default();
    let backend = tracing::subscriber::with_default(log.clone(), || {
        MetalBackend::new(device, model.config.clone(), &model.weights, &options).unwrap()
    });
    let lines = log.0.lock().unwrap().clone();
    // Another one is about where the file has its weights.
    let warns =
        |(level, text): &&(Level, String)| *level == Level::WARN && text.contains("tensor operations");
    let warnings = lines.iter().filter(warns).map(|(_, text)| text.clone());
    let path = lines.iter().find(|(_, text)| text.contains("are multiplied by")).unwrap().1.clone();
    (backend.features(), warnings.collect(), path)
}

#[test]
fn a_device_with_tensor_units_gets_kernels_for_them_unless_told_otherwise() {
    let (features, warnings, path) = load(ShimDevice::with_tensors(1 << 30), true);
    assert_eq!((features, warnings), (TENSOR, vec![]));
    assert!(path.ends_with("by tensor operations (Metal 4)"), "{path}");
    for (device, tensor) in [(ShimDevice::with_tensors(1 << 30), false), (ShimDevice::new(1 << 30), true)] {
        let (features, warnings, path) = load(device, tensor);
        assert_eq!((features, warnings), (KvType::Bf16.into(), vec![]));
        assert!(path.ends_with("by simdgroup_matrix (Metal 3.1)"), "{path}");
    }
}

/// Their first products are of values, not of codes.
#[test]
fn a_model_in_bf16_gets_them_too() {
    let model = unquantised(true, 5);
    let options = Options {
        context: 128,
        max_batch_tokens: 64,
        max_sequences: 2,
        aligned_copies: false,
        ..Options::default()
    };
    let device = ShimDevice::with_tensors(1 << 30);
    let backend = MetalBackend::new(device, model.config.clone(), &model.weights, &options).unwrap();
    assert_eq!(backend.features(), TENSOR);
}

/// Kernels that don't compile, and kernels that compute something else, are not used; and that is said.
#[test]
fn tensor_operations_that_fail_are_not_used() {
    let refuse = |_| Err(DeviceError::Compile("no member named is_valid_element".to_owned()));
    // Rows and columns, as a GPU would that has its matrices the other way.
    let turn = |text: String| {
        let right = "const uint out = first_out + uint(place[0]);\n            const uint row = first_row + uint(place[1]);";
        assert!(text.contains(right));
        Ok(text.replace(right, &right.replace("[0]", "[2]").replace("[1]", "[0]").replace("[2]", "[1]")))
    };
    let forget = |text: String| Ok(text.replace("out[i] *= kept[", "out[i] *= 1.0f + 0.0f * kept["));
    // As one whose registers don't suffice.
    let narrow = |text: String| {
        let (before, after) = text.split_once("kernel void down_tensor(").unwrap();
        let (before, _) = before.rsplit_once("[[").unwrap();
        Ok(format!("{before}[[max_total_threads_per_threadgroup(96)]]\nkernel void down_tensor({after}"))
    };
    let spoilers: [(Spoil, &str); 4] = [
        (refuse, "no member named is_valid_element"),
        (turn, "matmul_tensor gives "),
        (forget, "attend_tensor gives "),
        (narrow, "can't run kernel down_tensor: threads of a threadgroup are 96, expected 128"),
    ];
    for (spoil, why) in spoilers {
        let mut device = ShimDevice::with_tensors(1 << 30);
        device.spoil = spoil;
        let (features, warnings, _) = load(device, true);
        assert_eq!(features, KvType::Bf16.into());
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        for words in [why, "tensor operations are not used", "--metal-selftest", "--metal-no-tensor"] {
            assert!(warning.contains(words), "{words:?} is not in {warning}");
        }
    }
}

#[test]
fn right_kernels_pass_the_self_test() {
    let model = nano();
    let mut device = ShimDevice::with_tensors(1 << 30);
    let report = run(&mut device, &model.config, &model.weights, TENSOR).unwrap();
    assert!(report.passed(), "{report}");
    let text = report.to_string();
    assert!(text.contains("matrices of many rows by: tensor operations (Metal 4)"), "{text}");
    for kernel in ["matmul_tensor ", "matmul_tensor_32 ", "gate_up_tensor ", "down_tensor ", "attend_tensor "]
    {
        let line = text.lines().find(|line| line.trim_start().starts_with(kernel));
        assert!(line.is_some_and(|line| line.ends_with(" ok")), "{kernel}: {text}");
    }
}

/// Each text is put in place of the other, and this kernel must be named for it.
#[test]
fn a_broken_kernel_is_named_by_the_self_test() {
    let model = nano();
    let text = source::source(&model.config, TENSOR);
    for (kernel, right, wrong) in [
        ("gate_up_tensor", "silu(gated) * upped", "silu(upped) * gated"),
        ("down_tensor", "* HIDDEN + out] = sums[i];", "* HIDDEN + out] = 2.0f * sums[i];"),
        ("norm_rows_half", "four.z * factor * by.z", "four.z * factor * by.y"),
        ("norm_rows_both", "((device float4*)plain)[2 * i + j] =", "((device float4*)plain)[2 * i] ="),
        ("norm_heads_half", "half(gated[at] *", "half(gated[i] *"),
        ("combine_half", "To(sum / simd_sum(total)", "To(sum / simd_sum(2.0f * total)"),
        ("attend_tensor", "sum += share;", "sum += 2.0f * share;"),
    ] {
        assert!(text.contains(right), "{right}");
        let mutant = text.replace(right, wrong);
        let mut device = ShimDevice::with_tensors(1 << 30);
        let report = run_source(&mut device, &model.config, &model.weights, TENSOR, &mutant).unwrap();
        let failed = report.outcomes.iter().filter(|o| !o.passed()).map(|o| o.kernel);
        assert!(failed.collect::<Vec<_>>().contains(&kernel), "{kernel}: {report}");
    }
}

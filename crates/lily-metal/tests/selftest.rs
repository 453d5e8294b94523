//! The self-test passes right kernels and names wrong ones.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::device::ShimDevice;
use common::model::{Model, folder};
use lily_metal::plan::KvType;
use lily_metal::selftest::{Report, run, run_source};
use lily_metal::source;

fn nano() -> Model {
    Model::load(&folder("tests/data/nano/mlx-4bit"))
}

fn failed(report: &Report) -> Vec<&str> {
    report.outcomes.iter().filter(|o| !o.passed()).map(|o| o.kernel).collect()
}

#[test]
fn right_kernels_pass() {
    let model = nano();
    for kv in [KvType::Bf16, KvType::F32] {
        let report = run(&mut ShimDevice::new(1 << 30), &model.config, &model.weights, kv).unwrap();
        println!("{report}");
        assert!(report.passed(), "{report}");
        let text = report.to_string();
        let signatures = common::signature::signatures(&source::source(&model.config, kv)).unwrap();
        for signature in signatures {
            let line =
                text.lines().find(|line| line.trim_start().starts_with(&format!("{} ", signature.name)));
            assert!(line.is_some_and(|line| line.ends_with(" ok")), "{}: {text}", signature.name);
        }
    }
}

/// Each text is put in place of the other, and this kernel must be named for it first, and no other but what reads what it did
/// not write.
#[test]
fn a_broken_kernel_is_named_with_what_it_did() {
    let model = nano();
    let mutants = [
        ("embed", "x[i] = float(scales[at / GROUP])", "x[i] = 1.5f * float(scales[at / GROUP])", "x["),
        ("gate_up", "weight * silu(g) * u", "weight * silu(u) * g", "middle["),
        ("attend", "weight * float(value[i])", "float(value[i])", "parts["),
        ("finish", "position[0] += 1", "position[0] += 2", "token, position, fault are"),
        ("router", "logits[row + r] = sum;", "logits[row + r + 4096] = sum;", "outside of its memory"),
    ];
    let text = source::source(&model.config, KvType::Bf16);
    for (kernel, right, wrong, words) in mutants {
        assert!(text.contains(right), "{right}");
        let mutant = text.replace(right, wrong);
        let mut device = ShimDevice::new(1 << 30);
        let report = run_source(&mut device, &model.config, &model.weights, KvType::Bf16, &mutant).unwrap();
        let expected = if kernel == "router" { vec![kernel, "finish"] } else { vec![kernel] };
        assert_eq!(failed(&report), expected, "{report}");
        assert!(!report.passed());
        let text = report.to_string();
        for words in [words, "WRONG", "position ", ", layer ", &format!("{kernel}: ")] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
    }
}

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
    let (quantised, bf16) = (nano(), Model::load(&folder("tests/data/nano/hf")));
    for (model, kv) in [(&quantised, KvType::Bf16), (&quantised, KvType::F32), (&bf16, KvType::Bf16)] {
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

/// Each text is put in place of the other, and these kernels must be named for it, and no other.
#[test]
fn a_broken_kernel_is_named_with_what_it_did() {
    let model = nano();
    let mutants: [(&[&str], _, _, _); 7] = [
        (&["router", "gate_up"], "= weight * silu(g) * u;", "= weight * silu(u) * g;", "middle["),
        (&["down"], "scale_inputs(in, weight);", "scale_inputs(in, -weight);", "x["),
        (&["finish", "advance"], "position[0] += rows[0];", "position[0] += 2;", "position is Some("),
        (&["finish"], "counter[0]) * 0xd2511f53u", "counter[0]) * 0xd2511f51u", "token is Some("),
        // `delta_chunks` is held to tokens one by one, whatever it gets.
        (
            &["prepare_chunks", "delta_chunks"],
            "i == c ? entered * between : 0.0f",
            "i == c ? entered : 0.0f",
            "chunk_matrices[",
        ),
        // What is pending is replayed backwards.
        (
            &["delta", "delta_chunks"],
            "for (uint token = 0; token < pending; ++token)",
            "for (uint token = pending; token-- > 0;)",
            "Recurrent of layer ",
        ),
        // What is not written shows in the logits.
        (&["finish", "append"], "q + ulong(row) * QUERY_WIDTH", "q + 99999999", "outside of its memory"),
    ];
    let text = source::source(&model.config, KvType::Bf16);
    for (kernels, right, wrong, words) in mutants {
        assert!(text.contains(right), "{right}");
        let mutant = text.replace(right, wrong);
        let mut device = ShimDevice::new(1 << 30);
        let report = run_source(&mut device, &model.config, &model.weights, KvType::Bf16, &mutant).unwrap();
        assert_eq!(failed(&report), kernels, "{report}");
        assert!(!report.passed());
        let text = report.to_string();
        for words in [words, "WRONG", "position ", ", layer ", &format!("{}: ", kernels[0])] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
    }
}

/// The same kernels on a GPU that allows them fewer threads than they are launched with.
#[test]
fn a_kernel_that_the_gpu_has_no_room_for_is_named() {
    let model = nano();
    let mut device = ShimDevice::new(1 << 30);
    device.most_threads = 512;
    let report = run(&mut device, &model.config, &model.weights, KvType::Bf16).unwrap();
    let failed = failed(&report);
    assert!(failed.contains(&"finish") && !failed.contains(&"attend"), "{report}");
    assert!(
        report.to_string().contains("it may have 512 threads, 32 a SIMD-group; it needs 1024, 32"),
        "{report}"
    );
}

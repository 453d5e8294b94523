use crate::{assert_refused, output, path, stdout};

#[test]
fn every_kind_of_device_has_a_line() {
    let done = output(&["doctor"]);
    let text = stdout(&done);
    assert!(text.starts_with(concat!("lily ", env!("CARGO_PKG_VERSION"), " for ")), "{text}");
    for kind in ["cpu: ", "cuda", "metal: "] {
        assert!(text.lines().any(|line| line.starts_with(kind)), "{kind}: {text}");
    }
}

#[test]
#[cfg(not(target_vendor = "apple"))]
fn the_metal_self_test_is_for_macs() {
    assert_refused(&output(&["doctor", "--metal-selftest"]), 2, &["--metal-selftest is for Macs"]);
}

/// Apple's compiler can be tried on them without a GPU.
#[test]
fn the_metal_kernels_can_be_written_to_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kernels.metal");
    stdout(&output(&["doctor", "--metal-source", path(&file)]));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("#define MATRIX_BITS 4u\n") && text.contains("kernel void lm_head("));
    assert!(!text.contains("_tensor("));
    stdout(&output(&["doctor", "--metal-source", path(&file), "--metal-tensor"]));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("#include <metal_stdlib>") && text.contains("kernel void matmul_tensor("));
    let nowhere = folder.path().join("no/folder");
    assert_refused(&output(&["doctor", "--metal-source", path(&nowhere)]), 1, &["no/folder"]);
}

use std::fs;
use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};

use crate::{assert_refused, output, path, stdout};

struct Case {
    folder: tempfile::TempDir,
    ids: PathBuf,
}

impl Case {
    fn new(ids: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ids.txt");
        fs::write(&file, ids).unwrap();
        Self { folder, ids: file }
    }

    fn args<'a>(&'a self, out: &'a str) -> [&'a str; 5] {
        ["logits", "--ids", path(&self.ids), "--out", out]
    }

    /// Shape and values.
    fn logits(&self, options: &[&str]) -> (Vec<usize>, Vec<f32>) {
        let out = self.folder.path().join("logits.safetensors");
        stdout(&output(&[&self.args(path(&out))[..], options].concat()));
        let bytes = fs::read(&out).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(tensors.names(), ["logits"]);
        let logits = tensors.tensor("logits").unwrap();
        assert_eq!(logits.dtype(), Dtype::F32);
        let values = logits.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (logits.shape().to_vec(), values)
    }
}

#[test]
fn every_position_has_its_row_and_the_reference_agrees() {
    // More than one step's worth.
    let ids: Vec<String> = (0..270).map(|i| (i * 31 % 8000).to_string()).collect();
    let case = Case::new(&ids.join(", "));
    let (shape, fast) = case.logits(&["--cpu-exact"]);
    assert_eq!(shape, [270, 8192]);
    let (shape, reference) = case.logits(&["--reference"]);
    assert_eq!(shape, [270, 8192]);
    let worst = fast.iter().zip(&reference).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-3, "the worst difference is {worst}");
    assert!(reference.iter().any(|x| x.abs() > 1.0));
}

#[test]
fn commas_and_white_space_separate() {
    let (shape, a) = Case::new("1,2 3\n4,\t5\n").logits(&["--threads", "1"]);
    assert_eq!(shape[0], 5);
    assert!(a == Case::new("1 2 3 4 5").logits(&["--threads", "2"]).1, "threads must not change a result");
}

#[test]
fn bad_ids_are_refused_and_nothing_is_written() {
    let cases = [
        ("1 2 x", 1, "ids.txt: entry 2 is \"x\", expected a token id below 8192"),
        ("8192", 1, "entry 0 is \"8192\""),
        ("-1", 1, "entry 0 is \"-1\""),
        (" \n", 1, "ids.txt holds no token ids"),
        (&"1 ".repeat(5000), 2, "holds 5000 ids"),
    ];
    for (ids, code, words) in cases {
        let case = Case::new(ids);
        let out = case.folder.path().join("out.safetensors");
        assert_refused(&output(&case.args(path(&out))), code, &[words]);
        assert_eq!(fs::read_dir(case.folder.path()).unwrap().count(), 1, "{ids}");
    }
}

#[test]
fn files_that_cannot_be_are_named() {
    let case = Case::new("1");
    let nowhere = case.folder.path().join("no/such/folder.safetensors");
    assert_refused(&output(&case.args(path(&nowhere))), 1, &["folder.safetensors can't be written"]);
    fs::remove_file(&case.ids).unwrap();
    assert_refused(&output(&case.args("x")), 1, &["ids.txt"]);
}

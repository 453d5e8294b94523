//! With the real model: `LILY_MODEL_35B=FOLDER cargo test --release -p lily -- --ignored`.

use serde_json::Value;

use crate::{output, stdout};

fn json(command: &str, args: &[&str]) -> Value {
    let folder = std::env::var("LILY_MODEL_35B").expect("LILY_MODEL_35B names the folder of Qwen3.6-35B-A3B");
    let args = [&[command, "--json", "--model", &folder][..], args].concat();
    serde_json::from_str(stdout(&output(&args))).unwrap()
}

#[test]
#[ignore = "needs LILY_MODEL_35B"]
fn it_has_the_published_shapes() {
    assert_eq!(json("inspect", &[])["parameters"], 34_660_610_688_u64);
}

#[test]
#[ignore = "needs LILY_MODEL_35B"]
fn it_knows_the_capital_of_france() {
    let prompt = "What is the capital of France? Answer with one word.";
    let reply = json("run", &["--no-think", "--temperature", "0", "-n", "16", prompt]);
    assert!(reply["text"].as_str().unwrap().contains("Paris"), "{reply}");
    assert_eq!(reply["finish_reason"], "stop");
}

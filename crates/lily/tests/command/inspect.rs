use serde_json::Value;

use crate::{assert_refused, output, path, stdout};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(stdout(&output(args))).unwrap()
}

#[test]
fn the_real_models_numbers() {
    let report = json(&["inspect", "--preset", "35b-a3b", "--ctx-size", "262144", "--json"]);
    assert_eq!(report["weights"]["bytes"], 19_508_787_456_u64);
    assert_eq!(report["weights"]["bytes_per_decoded_token"], 1_669_561_728);
    assert_eq!(report["shapes"]["layers"], 40);
    assert_eq!(report["shapes"]["moe"]["experts"], 256);
    let bf16 = &report["state"][0];
    assert_eq!(bf16["kv_bytes_per_token"], 20_480);
    // 62.9 MB of recurrent state and 2.9 MB of convolution state.
    assert_eq!(bf16["fixed_bytes"], 62_914_560 + 2_949_120);
    assert_eq!(bf16["bytes_at_context"], 65_863_680_u64 + 20_480 * 262_144);
    let memory = 19_508_787_456_u64 + 65_863_680 + 20_480 * 262_144;
    assert_eq!(bf16["memory_bytes"], memory);
    let exact = &report["state"][1];
    assert_eq!(exact["held_by"], "cpu, --cpu-exact: f32 K/V");
    assert_eq!(exact["kv_bytes_per_token"], 40_960);
}

#[test]
fn people_get_a_table() {
    let done = output(&["inspect", "--preset", "35b-a3b"]);
    for words in ["35b-a3b: 34,660,610,688 parameters", "18,119,393,280", "20,480 bytes", "1,669,561,728"] {
        assert!(stdout(&done).contains(words), "{words}: {}", stdout(&done));
    }
}

/// The code that decodes on a GPU says what it would launch, on any machine.
#[test]
fn a_gpus_decode_step_is_listed() {
    for device in ["cuda", "metal"] {
        let args = ["inspect", "--preset", "35b-a3b", "--device", device, "--ctx-size", "32768"];
        let report = json(&[&args[..], &["--json"]].concat());
        let number = |name: &str| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"));
        let (kernels, stages) = (number("kernels_per_token"), number("stages_per_token"));
        assert!(kernels <= 270 && stages <= 270, "{device}: {kernels} kernels, {stages} stages");
        let launches = report["launches"].as_array().unwrap();
        assert_eq!(launches.len() as u64, kernels);
        assert_eq!(launches.iter().map(|l| l["stages"].as_u64().unwrap()).sum::<u64>(), stages);
        let bytes = number("bytes_per_token");
        assert_eq!(launches.iter().map(|l| l["bytes"].as_u64().unwrap()).sum::<u64>(), bytes);
        // Metal writes recurrent states for every fourth token only.
        let written = if device == "metal" { 62_914_560 / 4 } else { 62_914_560 };
        let weights = number_of(&report["weights"]["bytes_per_decoded_token"]);
        let least = weights + 62_914_560 + written + 2 * 2_949_120;
        assert!(
            bytes as f64 >= 0.99 * least as f64 && bytes as f64 <= 1.05 * least as f64,
            "{bytes}, {least}"
        );
        assert_eq!(number("bytes_per_token_at_context") - bytes, 20_480 * 32_768);
        let (state, table) = (report["state"].as_array().unwrap(), output(&args));
        let held = state.last().unwrap();
        assert_eq!(held["kv_bytes_per_token"], 20_480);
        if device == "metal" {
            // Its convolution keeps a row more than the last inputs; then there are the log and how much of it is used.
            let fixed = 62_914_560 + 3_932_160 + 30 * (74_240 + 512);
            assert_eq!(held["fixed_bytes"], fixed);
            assert_eq!(held["bytes_at_context"], fixed + 20_480 * 32_768_u64);
        }
        let first = launches[0]["kernel"].as_str().unwrap();
        for words in ["decoding a token on a GPU", first] {
            assert!(stdout(&table).contains(words), "{words}: {}", stdout(&table));
        }
    }
}

#[test]
#[cfg(not(target_vendor = "apple"))]
fn metal_is_for_macs_and_says_so() {
    assert_refused(&output(&["run", "--device", "metal", "hello"]), 2, &["for Macs", "--device cpu"]);
}

/// What each kernel of a decoded token moves in all, and how long that takes at the least.
#[test]
fn kernels_are_summed_up() {
    let args = ["inspect", "--preset", "35b-a3b", "--device", "metal", "--ctx-size", "4096"];
    let table = output(&args);
    let table = stdout(&table);
    let (_, table) = table.split_once("us at 614 GB/s (M5 Max)").unwrap();
    let row = |kernel: &str| -> Vec<String> {
        let line = table.lines().find(|line| line.trim_start().starts_with(&format!("{kernel} "))).unwrap();
        line.split_whitespace().map(|word| word.replace(',', "")).collect()
    };
    // 248,320 rows of 2,048 codes of 4 bits, with a scale and a bias for every 64, and the norm.
    let bytes = 248_320 * (1024 + 32 * 4) + 4 * 2048;
    assert_eq!(row("lm_head")[1..4], ["1".to_owned(), "128".to_owned(), bytes.to_string()]);
    assert_eq!(row("lm_head")[4], format!("{:.1}", f64::from(bytes) / 614e9 * 1e6));
    assert_eq!(row("gate_up")[1], "40");
}

/// A chunk of a prompt, with the kernels that every Apple GPU runs, and with those of an M5.
#[test]
fn what_reads_a_prompt_on_a_mac_is_listed() {
    let args = ["inspect", "--preset", "35b-a3b", "--device", "metal", "--ctx-size", "4096"];
    for (option, matrices, kernel, buffers) in [
        ("--metal-tensor", "tensor operations (Metal 4)", "gate_up_tensor", [9, 9]),
        ("--metal-no-tensor", "simdgroup_matrix (Metal 3.1)", "gate_up_rows", [39, 43]),
    ] {
        let report = json(&[&args[..], &["--json", option]].concat());
        let step = &report["prompt_step"];
        assert_eq!((&step["tokens"], &step["matrices"]), (&512.into(), &matrices.into()));
        let launches = step["launches"].as_array().unwrap();
        assert_eq!(launches.len() as u64, number_of(&step["kernels"]));
        // The last layer's experts see the last token alone.
        assert_eq!(launches.iter().filter(|l| l["kernel"] == kernel).count(), 39);
        assert_eq!(step["command_buffers"], serde_json::json!(buffers));
        let table = output(&[&args[..], &[option]].concat());
        for words in [format!("matrices of many rows by {matrices}"), format!("  {kernel} ")] {
            assert!(stdout(&table).contains(&words), "{words}: {}", stdout(&table));
        }
    }
}

fn number_of(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// All kinds of them: `args.rs`.
#[test]
fn what_is_for_gpus_says_so() {
    assert_refused(&output(&["inspect", "--metal-tensor"]), 2, &["--metal-tensor is for --device metal"]);
    for option in [&["--profile"][..], &["--synth", "35b-a3b"]] {
        assert_refused(&output(&[&["bench"], option].concat()), 2, &[option[0], "--device cuda"]);
    }
}

#[test]
fn the_built_in_model_and_its_preset_are_the_same() {
    let (mut model, mut preset) =
        (json(&["inspect", "--json"]), json(&["inspect", "--preset", "demo", "--json"]));
    assert_eq!((model["model"].take(), preset["model"].take()), ("lily-demo".into(), "demo".into()));
    assert_eq!(model, preset);
}

#[test]
fn a_folder_needs_nothing_but_its_config() {
    let folder = tempfile::tempdir().unwrap();
    let config = include_bytes!("../../../../tests/data/nano/mlx-4bit/config.json");
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let report = json(&["inspect", "--model", path(folder.path()), "--json"]);
    assert_eq!(report["shapes"]["hidden_size"], 64);
    assert_eq!(report["model"], folder.path().file_name().unwrap().to_str().unwrap());
}

#[test]
fn an_unknown_preset_is_refused() {
    assert_refused(&output(&["inspect", "--preset", "7b"]), 2, &["7b", "demo", "35b-a3b"]);
}

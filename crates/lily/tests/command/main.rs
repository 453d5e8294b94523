//! The command as its users meet it: processes, their output and how they end.
#![allow(clippy::unwrap_used, reason = "tests fail where they must")]

mod cache;
mod chat;
mod clients;
mod demo;
mod doctor;
mod inspect;
mod logits;
mod model_35b;
mod run;
mod serve;
mod signals;
mod synth;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

/// Folder of a random model of the demonstration model's shapes: it goes on for ever, and will whatever is
/// trained.
static RANDOM: LazyLock<String> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("random");
    // Of an earlier run; absent at first.
    let _ = fs::remove_dir_all(&folder);
    let folder = path(&folder).to_owned();
    stdout(&output(&["synth", "--preset", "demo", "--seed", "1", "--out", &folder]));
    folder
});

/// The command with these arguments, and nothing from the environment. Where there is a GPU but no cargo, tools/gpu/run says
/// which binary to test and on what.
fn lily(args: &[&str]) -> Command {
    let binary = std::env::var_os("LILY_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_lily").into());
    let mut command = Command::new(binary);
    command.args(args).stdin(Stdio::null());
    if let Some(device) = std::env::var_os("LILY_TEST_DEVICE") {
        command.arg("--device").arg(device);
    }
    for variable in [
        "LILY_MODEL",
        "LILY_LOG",
        "LILY_LOG_FORMAT",
        "LILY_API_KEY",
        "NO_COLOR",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
    ] {
        command.env_remove(variable);
    }
    command
}

fn output(args: &[&str]) -> Output {
    lily(args).output().unwrap()
}

/// Runs with something on standard input.
fn output_with_input(args: &[&str], input: &[u8]) -> Output {
    let mut child =
        lily(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that refuses its arguments doesn't read.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

/// Standard output of a run that succeeds.
#[track_caller]
fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// A failure with this exit code whose message says all of this.
#[track_caller]
fn assert_refused(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let message = stderr(output);
    for word in words {
        assert!(message.contains(word), "{message:?} should say {word:?}");
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

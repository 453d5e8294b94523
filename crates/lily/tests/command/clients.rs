//! The tests in `tests/clients`: real clients against real servers.

use std::path::Path;
use std::process::Command;

#[test]
#[ignore = "needs packages of Python and Node: ./test installs them and runs this"]
fn clients_in_python() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let pytest = root.join(".venv/bin/pytest");
    assert!(pytest.exists(), "{} is missing: run ./test, which makes it", pytest.display());
    let lily = Path::new(env!("CARGO_BIN_EXE_lily"));
    // Built with the workspace's tests, beside the command.
    let scripted = lily.with_file_name("examples").join("scripted_server");
    let tests = Command::new(pytest)
        .args(["-p", "no:cacheprovider", "tests/clients"])
        .current_dir(&root)
        .env("LILY_BIN", lily)
        .env("LILY_SCRIPTED_SERVER", scripted)
        .env_remove("LILY_MODEL")
        .status();
    assert!(tests.unwrap().success());
}

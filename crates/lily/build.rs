//! Lists the files of the demonstration model, which are embedded in the program.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// What is taken from the folder, by the end of the name.
const WANTED: [&str; 3] = [".json", ".jinja", ".safetensors"];

/// What the program relies on.
const NEEDED: [&str; 6] = [
    "config.json",
    "model.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    println!("cargo::rerun-if-changed={}", folder.display());
    for name in NEEDED {
        let file = folder.join(name);
        assert!(file.is_file(), "{} is missing: the demonstration model is incomplete", file.display());
    }
    let list: String = files(&folder).iter().map(|path| entry(path)).collect();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("demo.rs");
    fs::write(&out, format!("&[{list}]")).expect("cargo's own folder can be written");
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let wanted = |path: &PathBuf| WANTED.iter().any(|end| path.to_string_lossy().ends_with(end));
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(wanted).collect();
    files.sort();
    files
}

fn entry(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!("({name:?}, include_bytes!({:?}) as &[u8]),", path.to_string_lossy())
}

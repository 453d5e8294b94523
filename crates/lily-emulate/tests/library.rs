//! What was compiled is compiled once, and again when anything of it has changed.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use lily_emulate::library::Compiler;

const TEXT: &str = "#include \"number.h\"\nextern \"C\" int number() { return NUMBER + MORE; }\n";

fn number(compiler: &Compiler, more: u32) -> i32 {
    let object = compiler.object("number.cpp", TEXT, &["-fPIC", &format!("-DMORE={more}")]).unwrap();
    let library = compiler.library(&[object]).unwrap();
    // SAFETY: the function has this type, and only computes.
    unsafe { library.function::<unsafe extern "C" fn() -> i32>("number").unwrap()() }
}

#[test]
fn a_change_of_a_text_a_flag_or_a_header_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let headers = folder.path().join("headers");
    fs::create_dir(&headers).unwrap();
    fs::write(headers.join("number.h"), "#define NUMBER 1").unwrap();
    let cache = folder.path().join("cache");
    let compiler = |headers: &Path| Compiler::new(&cache, &[headers]).unwrap();
    assert_eq!(number(&compiler(&headers), 1), 2);
    assert_eq!(number(&compiler(&headers), 5), 6);
    fs::write(headers.join("number.h"), "#define NUMBER 2").unwrap();
    assert_eq!(number(&compiler(&headers), 5), 7);
}

#[test]
fn what_is_there_is_not_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let object = || {
        let compiler = Compiler::new(folder.path(), &[]).unwrap();
        compiler.object("a.cpp", "int a;", &[]).unwrap()
    };
    let path = object();
    fs::File::options().write(true).open(&path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(object(), path);
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), SystemTime::UNIX_EPOCH);
}

#[test]
fn what_does_not_compile_or_link_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let compiler = Compiler::new(folder.path(), &[]).unwrap();
    let error = compiler.object("wrong.cpp", "\nint f() { return nothing; }", &[]).unwrap_err();
    assert!(error.contains("wrong.cpp:2") && error.contains("nothing"), "{error}");
    let object = compiler.object("part.cpp", "int g(); int f() { return g(); }", &["-fPIC"]).unwrap();
    let error = compiler.library(&[object]).unwrap_err();
    assert!(error.contains("g()"), "{error}");
}

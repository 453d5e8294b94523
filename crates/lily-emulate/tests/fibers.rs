//! Threads that are fibers wait for each other, and what is wrong with them ends their launch and nothing else.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::thread;

use lily_emulate::library::{Compiler, Library};
use lily_emulate::memory::{Guard, Guarded};

const TEXT: &str = include_str!("fibers.cpp");
const FLAGS: [&str; 6] =
    ["-O1", "-fPIC", "-Wall", "-Werror", "-fsanitize=bounds-strict", "-fsanitize-undefined-trap-on-error"];

type Launch = unsafe extern "C" fn(*const c_char, *mut u8) -> *const c_char;

/// Another library for each `name`.
fn library(name: &str) -> Library {
    let compiler = Compiler::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &[]).unwrap();
    compiler.library(&[compiler.object(name, TEXT, &FLAGS).unwrap()]).unwrap()
}

/// What a kernel leaves in memory of a number for each lane, or why it ended.
fn launch(library: &Library, kernel: &str, guard: Guard) -> Result<Vec<i32>, String> {
    let memory = Guarded::new(32 * 4, guard).unwrap();
    let name = CString::new(kernel).unwrap();
    // SAFETY: the function has this type, and what it returns is null or a constant.
    let problem = unsafe {
        let problem = library.function::<Launch>("launch").unwrap()(name.as_ptr(), memory.address());
        (!problem.is_null()).then(|| CStr::from_ptr(problem))
    };
    match problem {
        Some(problem) => Err(problem.to_str().unwrap().to_owned()),
        None => Ok(memory.bytes().as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect()),
    }
}

#[track_caller]
fn refused(library: &Library, kernel: &str, guard: Guard, why: &str) {
    assert_eq!(launch(library, kernel, guard), Err(why.to_owned()), "{kernel}");
    // The next launch is unharmed.
    assert_eq!(launch(library, "sums", guard), Ok(vec![31 * 16 + 32; 32]), "after {kernel}");
}

fn all(library: &Library) {
    assert_eq!(launch(library, "sums", Guard::End), Ok(vec![31 * 16 + 32; 32]));
    refused(library, "mixed", Guard::End, "lanes at different functions");
    refused(library, "waits", Guard::End, "it waits");
    refused(library, "behind", Guard::End, "an access outside of its memory");
    refused(library, "before", Guard::Start, "an access outside of its memory");
    refused(library, "undefined", Guard::End, "undefined behaviour: an index, a shift or an alignment");
}

#[test]
fn what_is_wrong_ends_the_launch() {
    all(&library("one.cpp"));
}

#[test]
fn a_thread_without_end_is_ended() {
    refused(&library("one.cpp"), "endless", Guard::End, "threads go on without end");
}

/// Each library handles faults, but only its own.
#[test]
fn libraries_run_side_by_side() {
    let libraries = ["two.cpp", "three.cpp", "four.cpp"].map(library);
    thread::scope(|scope| {
        for library in &libraries {
            scope.spawn(|| (0..20).for_each(|_| all(library)));
        }
    });
}

#[test]
fn chance_is_fair() {
    let library = library("one.cpp");
    // SAFETY: the function has this type.
    let is_fair = unsafe { library.function::<unsafe extern "C" fn(u32) -> bool>("is_chance_fair").unwrap() };
    for n in 1..64 {
        // SAFETY: it only computes.
        assert!(unsafe { is_fair(n) }, "below {n}");
    }
}

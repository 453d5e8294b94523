//! The kernels' text is Metal, as far as clang and a reading of the text can tell; and mistakes that a C++ compiler takes are
//! refused.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::io::Write;
use std::process::{Command, Stdio};

use common::cpu::shim;
use common::signature::signatures;
use common::text::{HEADERS, Way, standard, whole, without_attributes};
use lily_metal::plan::{Features, KvType};
use lily_metal::source;
use lily_model::config::Config;
use lily_model::presets::CONFIG_35B_A3B;

/// Narrowing and changes of sign must be written out, and nothing may be computed in f64.
const FLAGS: [&str; 12] = [
    "-x",
    "c++",
    "-fsyntax-only",
    "-nostdinc",
    "-DSHIM_CHECK",
    "-Wall",
    "-Wextra",
    "-Wno-unused-const-variable",
    "-Wconversion",
    "-Wdouble-promotion",
    "-pedantic-errors",
    "-Werror",
];

/// clang 19, or what `LILY_CLANG` names. Without it there is nothing to test, but where it is named that is a failure.
fn clang() -> Option<String> {
    let runs = |name: &str| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    if let Ok(name) = std::env::var("LILY_CLANG") {
        assert!(runs(&name), "{name} can't be run, though LILY_CLANG names it");
        return Some(name);
    }
    if !runs("clang++-19") {
        println!("skipped: there is no clang++-19 (Debian: apt install clang-19)");
        return None;
    }
    Some("clang++-19".to_owned())
}

/// What speaks against this being a Metal library.
fn check(clang: &str, source: &str) -> Result<(), String> {
    language(source)?;
    let text = whole(source, &signatures(source)?, Way::Check);
    let mut child = Command::new(clang)
        .arg(format!("-std={}", standard(source, Way::Check)))
        .args(FLAGS)
        .arg("-I")
        .arg(shim())
        .arg("-")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Rules of Metal that are not C++'s, and that no compiler here knows.
fn language(source: &str) -> Result<(), String> {
    let lines = source.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = without_attributes(&lines.clone().collect::<Vec<_>>().join("\n"));
    let refuse =
        |at: usize, what: &str| Err(format!("line {}: {what}", code[..at].matches('\n').count() + 1));
    let known = |line: &str| HEADERS.iter().any(|(include, _)| *include == line);
    if let Some(line) = lines.clone().find(|l| l.starts_with("#include") && !known(l)) {
        return Err(format!("{line}: expected no other header than those of Metal that the tests have"));
    }
    // Of a type that only the header can name; an address space must not hide in one.
    let unnamed = ["_cooperative_tensor<", ".get_multidimensional_index("];
    for (at, _) in code.match_indices("auto ") {
        let statement = code[at..].split(';').next().unwrap_or_default();
        let starts_word = !code[..at].ends_with(is_word);
        if starts_word && !unnamed.iter().any(|call| statement.contains(call)) {
            return refuse(at, "auto for something that has a name");
        }
    }
    if source.contains("[[function_constant(") {
        return Err("a function constant, which the plan doesn't set".to_owned());
    }
    for (at, _) in code.match_indices(['*', '&']) {
        let rest = code[..at].trim_end_matches(is_word);
        if rest.len() < at {
            let space = rest.trim_end().rsplit(|c| !is_word(c)).next().unwrap_or_default();
            if !["device", "constant", "threadgroup", "thread"].contains(&space) {
                return refuse(at, "a pointer or reference without an address space");
            }
        }
    }
    for (at, _) in code.match_indices('[') {
        let before = code[..at].trim_end();
        if !before.ends_with(|c| is_word(c) || c == ']' || c == ')') {
            return refuse(at, "a lambda");
        }
    }
    for (at, _) in code.match_indices("struct ") {
        if code[at..].split(['{', ';']).next().is_some_and(|head| head.contains(':')) {
            return refuse(at, "a derived class");
        }
    }
    program_scope(&code).map_or(Ok(()), |at| refuse(at, "a variable of the program that is not constant"))
}

/// Where a variable outside of all functions is not in the constant address space.
fn program_scope(code: &str) -> Option<usize> {
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in code.char_indices() {
        let declares = |text: &str| {
            let first = text.trim_start().split(|c| !is_word(c)).next().unwrap_or_default();
            let other = ["constant", "using", "typedef", "struct", "enum", "template", "static_assert"];
            let named = text.split(['=', '{']).next().unwrap_or_default();
            !text.trim().is_empty() && !other.contains(&first) && !named.contains('(')
        };
        match c {
            '#' if depth == 0 => begin = at + code[at..].find('\n').unwrap_or(0),
            '{' | ';' if depth == 0 => {
                // Macros were passed over above, so nothing else is left before it.
                if begin <= at && declares(&code[begin..at]) {
                    return Some(at);
                }
                begin = at + 1;
                depth += usize::from(c == '{');
            }
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                begin = at + 1;
            }
            _ => {}
        }
    }
    None
}

#[test]
fn the_kernels_are_metal() {
    let Some(clang) = clang() else { return };
    let nano = |form: &str| {
        let file = format!("tests/data/nano/{form}/config.json");
        std::fs::read(common::model::folder(&file)).unwrap()
    };
    for config in [nano("mlx-4bit"), nano("hf"), CONFIG_35B_A3B.into()] {
        let config = Config::from_json(&config).unwrap();
        for (kv, tensor) in [KvType::Bf16, KvType::F32].into_iter().flat_map(|kv| [(kv, false), (kv, true)]) {
            let features = Features { kv, tensor };
            let source = source::source(&config, features);
            check(&clang, &source).unwrap_or_else(|e| panic!("{features:?}: {e}"));
        }
    }
}

#[test]
fn every_file_of_kernels_is_checked() {
    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    let source = source::source(&config, Features { kv: KvType::Bf16, tensor: true });
    let folder = shim().join("../../kernels");
    let mut files = 0;
    for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        assert!(source.contains(&std::fs::read_to_string(&file).unwrap()), "{}", file.display());
        files += 1;
    }
    assert!(files > 0);
}

/// A right kernel, with places where something wrong goes.
const RIGHT: &str = "#include <metal_stdlib>
using namespace metal;
constant constexpr uint WIDTH = 64;
struct Pair {
    float a, b;
};
inline float first(const device float* x) {
    return x[0];
}
inline float held(const thread float* x) {
    return x[0];
}
// TOP
[[max_total_threads_per_threadgroup(64)]]
kernel void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    constant float* factors [[buffer(2)]],
    const device bfloat* rounded [[buffer(3)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]/* PARAMETER */
) {
    float mine[2] = {x[i], factors[i]};
    Pair pair = {held(mine), float(rounded[i])};
    shared[i] = first(x) + simd_sum(pair.a);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[WIDTH - 1 - i];
    // BODY
}
";

/// What is put where, and a part of the reason why it is refused.
const WRONG: [(&str, &str, &str); 60] = [
    // Address spaces.
    ("// BODY", "out[i] = first(factors);", "address space"),
    ("// BODY", "out[i] = first(shared);", "address space"),
    ("// BODY", "out[i] = first(mine);", "no known conversion"),
    ("// BODY", "out[i] = held(x);", "address space"),
    ("// BODY", "out[i] = held(factors);", "address space"),
    ("// BODY", "out[i] = held(shared);", "address space"),
    ("// BODY", "device float* other = shared;", "cannot initialize"),
    ("// BODY", "threadgroup float* other = out;", "cannot initialize"),
    ("// BODY", "threadgroup float other[64];", "address space"),
    ("// BODY", "factors[i] = 1.0f;", "read-only"),
    ("// BODY", "x[i] = 1.0f;", "read-only"),
    ("// BODY", "float* other = mine;", "without an address space"),
    ("// TOP", "inline float second(float& x) { return x; }", "without an address space"),
    ("// TOP", "float table[2] = {1.0f, 2.0f};", "not constant"),
    ("// TOP", "constexpr uint HEIGHT = 64;", "not constant"),
    ("// TOP", "uint count;", "not constant"),
    // Numbers.
    ("// BODY", "double d = 0.0;", "poisoned"),
    ("// BODY", "out[i] = x[i] * 0.1;", "double"),
    ("// BODY", "out[i] = rounded[i];", "bfloat"),
    ("// BODY", "const bfloat b = x[i];", "bfloat"),
    ("// BODY", "out[i] = float(rounded[i] * rounded[i]);", "invalid operands"),
    ("// BODY", "const uint n = x[i];", "float-conversion"),
    ("// BODY", "const float f = i;", "int-float-conversion"),
    ("// BODY", "const ulong n = i; const uint m = n; out[m] = 0.0f;", "shorten-64-to-32"),
    ("// BODY", "const ushort n = i;", "int-conversion"),
    ("// BODY", "const int n = i;", "sign-conversion"),
    // Matrices.
    ("// BODY", "simdgroup_matrix<float, 8, 4> m;", "there are no others"),
    ("// BODY", "simdgroup_float8x8 m; simdgroup_load(m, mine, 8);", "no matching function"),
    ("// BODY", "simdgroup_float8x8 m; simdgroup_load(m, rounded, 8);", "no matching function"),
    ("// BODY", "simdgroup_float8x8 m; simdgroup_store(m, x, 8);", "no matching function"),
    // C++ that Metal lacks.
    ("// BODY", "thread float* more = new float[2];", "poisoned"),
    ("// BODY", "goto end; end: out[i] = 0.0f;", "poisoned"),
    ("// BODY", "static float kept = 0.0f;", "poisoned"),
    ("// BODY", "thread_local float kept = 0.0f;", "poisoned"),
    ("// BODY", "try { out[i] = 0.0f; } catch (...) {}", "poisoned"),
    ("// BODY", "out[i] = [](float a) { return a; }(x[i]);", "a lambda"),
    ("// BODY", "if constexpr (WIDTH == 64) { out[i] = 0.0f; }", "C++17"),
    ("// BODY", "for (const auto m : mine) { out[i] += m; }", "auto for something that has a name"),
    ("// BODY", "out[i] = sizeof(long) == 8 ? 1.0f : 0.0f;", "poisoned"),
    ("// BODY", "uint n = i; float more[n];", "variable length array"),
    ("// TOP", "struct Base { virtual void f() {} };", "poisoned"),
    ("// TOP", "struct Triple : Pair { float c; };", "a derived class"),
    ("// TOP", "inline float one() noexcept { return 1.0f; }", "poisoned"),
    ("// TOP", "#include <math.h>", "no other header"),
    ("// TOP", "constant bool wide [[function_constant(0)]];", "function constant"),
    // What the header doesn't have.
    ("// BODY", "out[i] = erf(x[i]);", "undeclared"),
    ("// BODY", "out[i] = simd_sum(i == 0) ? 1.0f : 0.0f;", "SIMD-group functions don't take"),
    // Attributes.
    ("/* PARAMETER */", ",\ndevice float* y", "k: "),
    ("/* PARAMETER */", ",\ndevice float* y [[buffer(1)]]", "[[buffer(1)]], expected 4"),
    ("/* PARAMETER */", ",\ndevice float* y [[buffer(5)]]", "[[buffer(5)]], expected 4"),
    ("/* PARAMETER */", ",\nthreadgroup float* y [[threadgroup(0)]]", "[[threadgroup(0)]], expected 1"),
    ("/* PARAMETER */", ",\ndevice float* y [[bufer(4)]]", "bufer"),
    ("/* PARAMETER */", ",\nthreadgroup float* y [[buffer(4)]]", "no known conversion"),
    ("/* PARAMETER */", ",\ndevice float* y [[threadgroup(1)]]", "no known conversion"),
    ("/* PARAMETER */", ",\nthread float* y [[buffer(4)]]", "no known conversion"),
    ("/* PARAMETER */", ",\nuint2 lane [[thread_index_in_simdgroup]]", "no known conversion"),
    ("[[max_total_threads_per_threadgroup(64)]]\n", "", "how many threads?"),
    ("group(64)]]", "group(1056)]]", "at most 1024"),
    ("group(64)]]", "group(48)]]", "a multiple of 32"),
    ("kernel void k", "kernel float k", "of type void"),
];

/// [`RIGHT`] with something else in one place.
fn with(place: &str, text: &str) -> String {
    assert_eq!(RIGHT.matches(place).count(), 1, "{place}");
    RIGHT.replace(place, text).replace("/* PARAMETER */", "")
}

#[test]
fn what_is_not_metal_is_refused() {
    let Some(clang) = clang() else { return };
    check(&clang, &with("// BODY", "")).unwrap();
    let mut survivors = Vec::new();
    for (place, wrong, why) in WRONG {
        let found = check(&clang, &with(place, wrong)).err().unwrap_or_else(|| "nothing".to_owned());
        if !found.contains(why) {
            survivors.push(format!("{wrong}: expected {why:?}, found {found}"));
        }
    }
    assert!(survivors.is_empty(), "{}", survivors.join("\n"));
}

/// A right kernel with a product of tensors, with places where something wrong goes.
const RIGHT_TENSORS: &str = "#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> Tile;
typedef tensor<device bfloat, dextents<int, 2>, tensor_inline> Block;
template <int M, int N, int K>
using Product = mpp::tensor_ops::matmul2d<
    mpp::tensor_ops::matmul2d_descriptor(M, N, K, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply),
    execution_simdgroups<2>>;
template <class Sums> inline void clear_sums(thread Sums& sums) {
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
        sums[i] = 0.0f;
    }
}
// TOP
[[max_total_threads_per_threadgroup(64)]]
kernel void k(
    const device bfloat* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    threadgroup half* shared [[threadgroup(0)]]
) {
    Product<16, 32, 64> product;
    Tile a(shared, dextents<int, 2>(64, 16), array<int, 2>{1, 64});
    Tile b(shared, dextents<int, 2>(64, 32), array<int, 2>{1, 64});
    Block block((device bfloat*)x, dextents<int, 2>(64, 16), array<int, 2>{1, 64});
    auto sums = product.get_destination_cooperative_tensor<Tile, Tile, float>();
    clear_sums(sums);
    product.run(a, b, sums);
    const auto place = sums.get_multidimensional_index(0);
    out[uint(place[0])] = sums[0];
    // BODY
}
";

const WRONG_TENSORS: [(&str, &str, &str); 19] = [
    ("// BODY", "Block c(x, dextents<int, 2>(64, 16), array<int, 2>{1, 64});", "no matching constructor"),
    ("// BODY", "Tile c(out, dextents<int, 2>(64, 16), array<int, 2>{1, 64});", "no matching constructor"),
    (
        "// TOP",
        "typedef tensor<const device bfloat, dextents<int, 2>, tensor_inline> T; inline T t(T x) { return x; }",
        "no tensors of constants",
    ),
    (
        "// TOP",
        "typedef tensor<device bfloat, dextents<int, 3>, tensor_inline> T; inline T t(T x) { return x; }",
        "undefined template",
    ),
    ("// BODY", "product.run(a, block, sums);", "no matching member function"),
    ("// BODY", "product.run(a, b, out);", "no matching member function"),
    ("// BODY", "Product<16, 32, 32> other; other.run(a, b, sums);", "no matching member function"),
    (
        "// BODY",
        "auto others = product.get_destination_cooperative_tensor<Tile, Block, float>();",
        "of one type",
    ),
    (
        "// BODY",
        "auto others = product.get_destination_cooperative_tensor<Tile, Tile, half>();",
        "sums are float",
    ),
    (
        "// BODY",
        "typedef tensor<threadgroup float, dextents<int, 2>, tensor_inline> T; auto others = product.get_destination_cooperative_tensor<T, T, float>();",
        "of half or bfloat",
    ),
    ("// BODY", "Product<8, 32, 64> other; other.run(a, b, sums);", "multiples of 16"),
    ("// BODY", "Product<16, 24, 64> other; other.run(a, b, sums);", "multiples of 16"),
    ("// BODY", "Product<16, 32, 8> other; other.run(a, b, sums);", "multiple of 16"),
    ("// BODY", "out[0] = sums.get_mask(0) ? 1.0f : 0.0f;", "no member named 'get_mask'"),
    (
        "// BODY",
        "auto copy = sums; // by get_destination_cooperative_tensor<",
        "auto for something that has a name",
    ),
    ("// BODY", "auto factor = 2.0f; out[0] = factor;", "auto for something that has a name"),
    ("// BODY", "out[0] = sums[0] * shared[0];", "invalid operands"),
    ("// BODY", "shared[0] = half(1.0f); shared[1] = 1.0f;", "half"),
    ("// TOP", "template <class T> concept Any = true;", "poisoned"),
];

#[test]
fn tensors_that_are_not_metals_are_refused() {
    let Some(clang) = clang() else { return };
    check(&clang, RIGHT_TENSORS).unwrap();
    let mut survivors = Vec::new();
    for (place, wrong, why) in WRONG_TENSORS {
        assert_eq!(RIGHT_TENSORS.matches(place).count(), 1, "{place}");
        let found = check(&clang, &RIGHT_TENSORS.replace(place, wrong)).err();
        let found = found.unwrap_or_else(|| "nothing".to_owned());
        if !found.contains(why) {
            survivors.push(format!("{wrong}: expected {why:?}, found {found}"));
        }
    }
    assert!(survivors.is_empty(), "{}", survivors.join("\n"));
}

#[test]
fn a_kernel_with_more_buffers_than_a_gpu_takes_is_refused() {
    let up_to = |last: usize| {
        let more = (4..=last).map(|index| format!(",\n    device float* b{index} [[buffer({index})]]"));
        with("/* PARAMETER */", &more.collect::<String>())
    };
    assert!(signatures(&up_to(30)).is_ok());
    let error = signatures(&up_to(31)).unwrap_err();
    assert!(error.contains("[[buffer(31)]], expected 31, below 31"), "{error}");
}

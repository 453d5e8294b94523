//! CUDA kernels on the CPU: compiled as C++ as they are, with the few functions that have PTX replaced (`shim.h`), and run by fibers
//! (`runtime.cpp`). What they compute is compared with sums in f64.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
mod delta;
mod group;
mod machine;
mod wide;

use group::{Choice, Emulators, Layer, Lists};
use lily_cuda::kernels::SOURCES;
use lily_emulate::removed;
use wide::{Case, Product};

const CASE: Case = Case { rows: 70, tiles: 5, tokens: 8, clusters: 1, stages: 2, add: false, normed: false };

/// Odd numbers of tiles, so that some warps have none; of rows, so that the last unit is not full; of tokens. Clusters with several units,
/// with one, and with more stages than units.
const CASES: [Case; 9] = [
    Case { rows: 16, tiles: 1, tokens: 1, stages: 1, ..CASE },
    Case { rows: 21, tiles: 3, tokens: 3, stages: 1, add: true, ..CASE },
    Case { rows: 70, tiles: 9, tokens: 8, normed: true, ..CASE },
    Case { rows: 333, tiles: 5, tokens: 7, clusters: 2, stages: 2, add: true, normed: true },
    Case { rows: 450, tiles: 4, tokens: 5, clusters: 3, stages: 3, ..CASE },
    Case { rows: 200, tiles: 17, tokens: 2, clusters: 2, stages: 1, normed: true, ..CASE },
    Case { rows: 600, tiles: 8, tokens: 8, clusters: 1, stages: 4, add: true, ..CASE },
    Case { rows: 130, tiles: 33, tokens: 6, clusters: 1, stages: 2, ..CASE },
    Case { rows: 100, tiles: 7, tokens: 4, clusters: 1, stages: 8, ..CASE },
];

/// With Hopper's products of warpgroups and without, every kernel multiplies every case right, in whatever order its threads run, and all
/// get the same to the bit.
#[test]
fn wide_products() {
    let emulators = [true, false].map(|hopper| wide::emulator(hopper, str::to_owned));
    for (i, case) in CASES.into_iter().enumerate() {
        let product = Product::new(case, i as u64);
        let mut first: Option<Vec<f32>> = None;
        for (k, kernel) in wide::KERNELS.into_iter().enumerate() {
            for (seed, emulator) in emulators.iter().enumerate() {
                let seed = ((i * 10 + k) * 10 + seed) as u64;
                let y = product.run(emulator, kernel, seed).unwrap_or_else(|e| panic!("{case:?}: {e}"));
                product.check(&y).unwrap_or_else(|e| panic!("{case:?}, {kernel:?}, seed {seed}: {e}"));
                let same =
                    first.get_or_insert(y.clone()).iter().zip(&y).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{case:?}, {kernel:?}, seed {seed}: not what other kernels or orders get");
            }
        }
    }
}

/// Groups of 32 with more tokens, the last not full.
#[test]
fn wide_products_of_many_tokens() {
    let emulator = wide::emulator(true, str::to_owned);
    for (tokens, rows, stages) in [(32, 150, 2), (17, 70, 1), (41, 200, 3)] {
        let case = Case { tokens, rows, stages, tiles: 5, normed: true, ..CASE };
        let product = Product::new(case, tokens as u64);
        for kernel in &wide::KERNELS[1..] {
            let y = product.run(&emulator, *kernel, rows as u64).unwrap_or_else(|e| panic!("{case:?}: {e}"));
            product.check(&y).unwrap_or_else(|e| panic!("{case:?}, {kernel:?}: {e}"));
        }
    }
}

/// The kernel of many tokens gets what others get, to the bit: last groups of one record and of two; odd numbers of tiles, fewer than a row
/// has eighths, and more than a stage takes; rows that do not fill a warpgroup, and more units than blocks.
#[test]
fn products_of_a_chunk() {
    let (wide, chunk) = (wide::emulator(true, str::to_owned), wide::chunk_emulator(str::to_owned));
    let case = Case { rows: 128, tiles: 8, tokens: 64, clusters: 1, stages: 3, add: false, normed: false };
    let cases = [
        case,
        Case { rows: 70, tiles: 9, tokens: 33, normed: true, ..case },
        Case { rows: 150, tiles: 3, tokens: 130, add: true, normed: true, ..case },
        Case { rows: 300, tiles: 37, tokens: 97, clusters: 2, stages: 2, normed: true, ..case },
        Case { rows: 21, tiles: 64, tokens: 65, clusters: 2, add: true, ..case },
        Case { rows: 140, tiles: 1, tokens: 260, stages: 3, normed: true, ..case },
    ];
    for (i, case) in cases.into_iter().enumerate() {
        let product = Product::new(case, i as u64);
        let expected = product.run(&wide, wide::KERNELS[2], i as u64).unwrap();
        for seed in 0..4 {
            let y = product.run_chunk(&wide, &chunk, seed).unwrap_or_else(|e| panic!("{case:?}: {e}"));
            product.check(&y).unwrap_or_else(|e| panic!("{case:?}, seed {seed}: {e}"));
            let same = expected.iter().zip(&y).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{case:?}, seed {seed}: not what wide_32 gets");
        }
    }
}

/// Experts of steps that follow each other, so that counters must be as they were.
fn experts(emulators: &Emulators, cases: &[group::Case]) {
    let layer = Layer::new(emulators, 1);
    for (seed, case) in cases.iter().enumerate() {
        group::run(emulators, &layer, *case, seed as u64)
            .unwrap_or_else(|e| panic!("{case:?}, seed {seed}: {e}"));
    }
}

/// Lists by the kernel and by `route`; experts that none chose, and that all did; one block, and more than there is work for some of.
#[test]
fn experts_of_several_tokens() {
    let case = group::Case { tokens: 5, choice: Choice::Random, lists: Lists::Itself, blocks: 3 };
    let cases = [
        case,
        group::Case { tokens: 1, blocks: 2, ..case },
        group::Case { tokens: 8, lists: Lists::Route, blocks: 4, ..case },
        group::Case { tokens: 7, choice: Choice::Same, ..case },
        group::Case { tokens: 9, choice: Choice::Same, lists: Lists::Apart, ..case },
        group::Case { tokens: 3, blocks: 1, ..case },
        group::Case { tokens: 32, blocks: 4, ..case },
    ];
    experts(&Emulators::new(group::config(192, 37, 5, [64, 128]), str::to_owned), &cases);
}

/// Eighths of a row of different lengths, strips that are not full, experts wider than the shared one.
#[test]
fn wide_experts() {
    let case = group::Case { tokens: 6, choice: Choice::Random, lists: Lists::Itself, blocks: 4 };
    let cases = [
        case,
        group::Case { tokens: 11, lists: Lists::Apart, blocks: 3, ..case },
        group::Case { tokens: 2, blocks: 2, ..case },
    ];
    experts(&Emulators::new(group::config(576, 7, 2, [192, 64]), str::to_owned), &cases);
}

/// By the kernels of chunks: pieces of one record and of two, full and not; experts of other widths than the shared one's, with more units
/// than blocks and with stages that are not full; a tile an eighth.
#[test]
fn experts_of_a_chunk() {
    let case = group::Case { tokens: 70, choice: Choice::Random, lists: Lists::Apart, blocks: 2 };
    let cases = [
        case,
        group::Case { tokens: 97, choice: Choice::Same, blocks: 3, ..case },
        group::Case { tokens: 33, choice: Choice::Same, lists: Lists::Route, blocks: 1 },
        group::Case { tokens: 5, ..case },
    ];
    for config in [
        group::config(192, 9, 3, [64, 128]),
        group::config(576, 5, 2, [192, 64]),
        group::config(320, 4, 2, [512, 512]),
    ] {
        let emulators = Emulators::with_chunk(config, str::to_owned);
        let layer = Layer::new(&emulators, 1);
        for (seed, case) in cases.into_iter().enumerate() {
            group::run_chunk(&emulators, &layer, case, seed as u64)
                .unwrap_or_else(|e| panic!("{case:?}, seed {seed}: {e}"));
        }
    }
}

const DELTA_RULES: [delta::Kernel; 3] = [delta::Kernel::Columns, delta::Kernel::Heads, delta::Kernel::Chunks];

/// Sequences of one row and of several, with their states in other places than they come.
#[test]
fn delta_rule() {
    let config = delta::config();
    let emulator = machine::Emulator::compile("gdn.cu", &config, str::to_owned);
    for (seed, kernel) in DELTA_RULES.into_iter().cycle().take(6).enumerate() {
        delta::run(&emulator, &config, kernel, &[1, 3, 2, 5, 1], seed as u64)
            .unwrap_or_else(|e| panic!("{kernel:?}, seed {seed}: {e}"));
    }
}

/// Segments that end in any row of what is brought together and of a run; that begin in any; long ones among short ones.
#[test]
fn delta_rule_of_chunks() {
    let config = delta::config();
    let emulator = machine::Emulator::compile("gdn.cu", &config, str::to_owned);
    let chunks =
        [&[70][..], &[2, 9, 33], &[16, 8, 17, 31, 7], &[64, 3, 5, 4], &[15, 32, 47], &[24, 6, 10, 11]];
    let both = [&[1, 30, 2, 24, 1][..], &[23, 1, 25, 1]];
    let cases = chunks.map(|rows| (delta::Kernel::Chunks, rows)).into_iter();
    for (seed, (kernel, rows)) in cases.chain(both.map(|rows| (delta::Kernel::Both, rows))).enumerate() {
        delta::run(&emulator, &config, kernel, rows, seed as u64)
            .unwrap_or_else(|e| panic!("{kernel:?}, {rows:?}, seed {seed}: {e}"));
    }
}

/// Steps of up to eight rows and of more have other columns.
#[test]
fn columns_of_the_delta_rule() {
    let config = delta::config();
    let [gdn, wide] =
        ["gdn.cu", "wide.cu"].map(|file| machine::Emulator::compile(file, &config, str::to_owned));
    let cases = [
        (delta::Kernel::Heads, &[1, 3, 1][..]),
        (delta::Kernel::Chunks, &[2, 5]),
        (delta::Kernel::Both, &[1, 26, 7]),
    ];
    for (seed, (kernel, rows)) in cases.into_iter().enumerate() {
        delta::run_columns([&gdn, &wide], &config, kernel, rows, seed as u64)
            .unwrap_or_else(|e| panic!("{kernel:?}, {rows:?}: {e}"));
    }
}

/// Runs without each call of `functions` in turn; those whose lack shows in none of the runs must be `unseen`.
fn each_is_needed(
    file: &str,
    functions: &[&str],
    unseen: &[&str],
    run: impl Fn(&dyn Fn(&str) -> String) -> Result<(), String>,
) {
    let text = SOURCES.iter().find(|s| s.name == file).unwrap().text;
    let mut missed = Vec::new();
    for call in removed::calls(text, functions) {
        let removed::Call { line_number, line, .. } = call;
        match run(&|text| removed::without(text, &call)) {
            Ok(()) => missed.push(line),
            Err(e) => println!("{file}:{line_number}: without `{line}`: {e}"),
        }
    }
    assert_eq!(missed, unseen, "calls whose lack does not show");
}

const ROUNDS: u64 = 10;

#[test]
#[ignore = "a minute: compiles wide.cu without each wait in turn"]
fn every_wait_of_wide_products_is_needed() {
    let functions = [
        "barrier_wait",
        "barrier_expect",
        "cluster_wait",
        "cluster_arrive<false>",
        "__syncthreads",
        "await_groups<1>",
        "await_groups<0>",
        "await_products<AFTER>",
        "commit_products",
        "named_sync<128>",
    ];
    let case = Case { rows: 450, clusters: 1, stages: 3, tiles: 9, ..CASE };
    let cases = [
        (case, wide::KERNELS[0]),
        (Case { tokens: 20, ..case }, wide::KERNELS[2]),
        (Case { tokens: 20, ..case }, wide::KERNELS[1]),
    ];
    // The last barrier of the cluster: a block waits for what is sent to it in any case.
    let unseen = ["cluster_wait();", "cluster_wait();  // no block ends while others send to it"];
    each_is_needed("wide.cu", &functions, &unseen, |edit| {
        let emulator = wide::emulator(true, edit);
        for (seed, (case, kernel)) in (0..ROUNDS).flat_map(|seed| cases.map(|c| (seed, c))) {
            let product = Product::new(case, 0);
            product.check(&product.run(&emulator, kernel, seed)?)?;
        }
        Ok(())
    });
}

#[test]
#[ignore = "a minute: compiles chunk.cu without each wait in turn"]
fn every_wait_of_products_of_a_chunk_is_needed() {
    let functions = [
        "barrier_wait",
        "barrier_arrive",
        "barrier_expect_more",
        "__syncthreads",
        "await_products<AFTER>",
        "commit_products",
    ];
    let wide = wide::emulator(true, str::to_owned);
    let case = Case { rows: 130, tiles: 9, tokens: 70, clusters: 1, stages: 2, add: false, normed: true };
    // Of the second, units of many tokens follow those of few in the same place.
    let cases = [case, Case { tiles: 1, tokens: 330, rows: 300, stages: 3, ..case }];
    each_is_needed("chunk.cu", &functions, &[], |edit| {
        let emulator = wide::chunk_emulator(edit);
        for (seed, case) in (0..ROUNDS).flat_map(|seed| cases.map(|case| (seed, case))) {
            let product = Product::new(case, 0);
            product.check(&product.run_chunk(&wide, &emulator, seed)?)?;
        }
        Ok(())
    });
}

#[test]
#[ignore = "a minute: compiles group.cu without each wait in turn"]
fn every_wait_of_experts_is_needed() {
    let functions = [
        "barrier_wait",
        "barrier_arrive",
        "parts_wait",
        "parts_arrive",
        "await_middle",
        "add_release",
        "__syncthreads",
    ];
    let cases = [(13, 2), (32, 4), (4, 4)].map(|(tokens, blocks)| group::Case {
        tokens,
        choice: Choice::Random,
        lists: Lists::Itself,
        blocks,
    });
    each_is_needed("group.cu", &functions, &[], |edit| {
        let emulators = Emulators::new(group::config(192, 37, 5, [64, 128]), edit);
        let layer = Layer::new(&emulators, 1);
        (0..ROUNDS)
            .flat_map(|seed| cases.map(|c| (seed, c)))
            .try_for_each(|(seed, case)| group::run(&emulators, &layer, case, seed))
    });
}

#[test]
#[ignore = "a minute: compiles gdn.cu without each wait in turn"]
fn every_wait_of_the_delta_rule_is_needed() {
    let functions = ["await_copies", "__syncthreads"];
    let config = delta::config();
    each_is_needed("gdn.cu", &functions, &[], |edit| {
        let emulator = machine::Emulator::compile("gdn.cu", &config, edit);
        (0..ROUNDS)
            .flat_map(|seed| DELTA_RULES.map(|kernel| (seed, kernel)))
            .try_for_each(|(seed, kernel)| delta::run(&emulator, &config, kernel, &[1, 3, 20, 5, 1], seed))
    });
}

//! Each kernel of planned steps on random values, against the CPU's functions.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
mod delta;

use std::collections::HashMap;

use common::close::{BF16_TOLERANCE, TOLERANCE, assert_close, assert_close_in_bf16, assert_close_in_half};
use common::draws::{self, Drawer};
use common::machine::{Machine, Step};
use common::model::{Model, edge_shapes, folder, random, unquantised};
use common::signature::{Parameter, Signature, signatures};
use common::{Guard, Kernels, ORDERS, Shape};
use fastrand::Rng;
use half::{bf16, f16};
use lily_emulate::removed::{self, Call};
use lily_metal::draw::Draw;
use lily_metal::plan::{
    Access, Binding, Contents, Features, KvType, Launch, SETTLE_EVERY, Segment, State, Want,
};
use lily_metal::selftest::{Drawn, Launched, is_half};
use lily_metal::{plan_step, source};
use lily_model::config::Config;
use lily_model::presets::CONFIG_35B_A3B;

/// A query of 1e-6 is the difference of two of 0.4: with one rounding less, as on a GPU, it is off by more than a bf16.
#[test]
fn values_in_bf16_may_be_off_by_one_or_by_what_cancels() {
    assert_close_in_bf16("rounded", &[1.0078125, -0.5], &[1.0, -0.50390625]);
    assert_close_in_bf16("cancelled", &[0.4140625, 1.4603e-6], &[0.4140625, 1.438e-6]);
    let wrong = || assert_close_in_bf16("wrong", &[1.015625], &[1.0]);
    assert!(std::panic::catch_unwind(wrong).is_err());
}

/// What the bound part of a buffer holds, as f32; of words, the bits.
fn values(machine: &mut Machine, step: &mut Step, binding: &Binding) -> Vec<f32> {
    let contents = step.plan.buffers[binding.buffer].contents.clone();
    let bytes = machine.bound(step, binding);
    match contents {
        Contents::State(_, State::Keys | State::Values) | Contents::Scratch("q")
            if machine.features.kv == KvType::Bf16 =>
        {
            bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
        }
        contents if is_half(&contents) => {
            bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
        }
        _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

/// Random state in the sequence of a segment, whose position is set; of it depends how many tokens are pending.
fn randomise(machine: &mut Machine, step: &mut Step, segment: usize, position: usize, random: &mut Rng) {
    let (kv, kv_width) = (machine.features.kv, machine.model.config.attention.kv_width());
    for at in 0..step.plan.buffers.len() {
        let buffer = &step.plan.buffers[at];
        let Contents::State(_, state) = buffer.contents else { continue };
        if buffer.segment != segment {
            continue;
        }
        let memory = machine.memory(step, at);
        let mut value = || random.f32() * 2.0 - 1.0;
        let written = &mut memory.bytes_mut()[..];
        match (state, kv) {
            (State::Pending, _) => {
                let pending = ((position % SETTLE_EVERY) as u32).to_le_bytes();
                written.as_chunks_mut::<4>().0.fill(pending);
            }
            (State::Conv | State::Recurrent | State::Log, _) => {
                written.as_chunks_mut::<4>().0.iter_mut().for_each(|to| *to = (value() * 0.5).to_le_bytes());
            }
            (_, KvType::F32) => {
                let written = &mut written[..position * kv_width * 4];
                written.as_chunks_mut::<4>().0.iter_mut().for_each(|to| *to = value().to_le_bytes());
            }
            (_, KvType::Bf16) => {
                let written = &mut written[..position * kv_width * 2];
                let rounded = |value: f32| bf16::from_f32(value).to_le_bytes();
                written.as_chunks_mut::<2>().0.iter_mut().for_each(|to| *to = rounded(value()));
            }
        }
    }
}

/// Tensor operations, with the caches that all of them take, and with the other ones.
const TENSOR: Features = Features { kv: KvType::Bf16, tensor: true };
const TENSOR_F32: Features = Features { kv: KvType::F32, tensor: true };

/// Something to do with the buffers before a launch.
type Before<'a> = &'a mut dyn FnMut(&Launch, &mut Machine, &mut Step);

/// Runs a step launch by launch and checks what each one leaves.
fn check_step(name: &str, machine: &mut Machine, step: &mut Step, before: Before) {
    let (mut layer, mut prepared) = (0, HashMap::new());
    for launch in step.plan.launches.clone() {
        before(&launch, machine, step);
        let segment = step.plan.segment_of(&launch);
        // Together they do what is known of tokens one after another.
        let earlier = if launch.kernel == "delta_chunks" { prepared.remove(&segment) } else { None };
        let inputs = check_launch(name, machine, step, layer, &launch, earlier.unwrap_or_default());
        if launch.kernel == "prepare_chunks" {
            prepared.insert(segment, inputs);
        }
        layer += usize::from(matches!(launch.kernel, "down" | "sum_slots"));
    }
}

/// `earlier`: what else the values follow from; gives what the launch was bound to.
fn check_launch(
    name: &str,
    machine: &mut Machine,
    step: &mut Step,
    layer: usize,
    launch: &Launch,
    earlier: HashMap<Contents, Vec<f32>>,
) -> HashMap<Contents, Vec<f32>> {
    let (kv, kernel, model) = (machine.features.kv, launch.kernel, machine.model);
    let contents = |step: &Step, b: &Binding| step.plan.buffers[b.buffer].contents.clone();
    let before = |machine: &mut Machine, step: &mut Step| {
        launch.bindings.iter().map(|b| (contents(step, b), values(machine, step, b))).collect()
    };
    let mut before: HashMap<_, _> = before(machine, step);
    earlier.into_iter().for_each(|(contents, values)| _ = before.entry(contents).or_insert(values));
    let position = before.get(&Contents::Position).map_or(0, |p| p[0].to_bits() as usize);
    let (config, weights) = (&model.config, &model.weights);
    let launched = Launched { config, weights, layer, position, kv, before };
    machine.run(step, launch);
    let got = |machine: &mut Machine, step: &mut Step, of: &Contents| {
        let binding = launch.bindings.iter().find(|b| contents(step, b) == *of).unwrap();
        values(machine, step, binding)
    };
    // Queries and weights are rounded there.
    let rounds = matches!(kernel, "attend_rows" | "attend_tensor") && kv == KvType::Bf16;
    for (contents, expected) in launched.of(kernel).unwrap_or_else(|| panic!("no check for {kernel}")) {
        let what = format!("{name}, position {position}, layer {layer}, {kernel}: {contents:?}");
        let got_values = got(machine, step, &contents);
        match contents {
            Contents::Scratch("parts") => {
                let weights = got(machine, step, &Contents::Scratch("weights"));
                let tolerance = if rounds { BF16_TOLERANCE } else { TOLERANCE };
                assert_close(&what, &launched.merged(&got_values, &weights), &expected, tolerance);
            }
            Contents::Scratch("chosen" | "order" | "tiles" | "best") | Contents::State(_, State::Pending) => {
                let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(got_values), bits(expected), "{what}");
            }
            Contents::State(_, State::Keys | State::Values) | Contents::Scratch("q")
                if kv == KvType::Bf16 =>
            {
                assert_close_in_bf16(&what, &got_values, &expected);
            }
            contents if is_half(&contents) => assert_close_in_half(&what, &got_values, &expected),
            _ => assert_close(&what, &got_values, &expected, TOLERANCE),
        }
    }
    launched.before
}

/// Checks what a step leaves for the next one.
fn check_end(name: &str, machine: &mut Machine, step: &mut Step, positions: &[usize], drawn: &[Drawn]) {
    let mut rows = 0;
    let vocab = machine.model.config.vocab_size;
    for (segment, (Segment { tokens, want, .. }, start)) in
        step.segments.clone().into_iter().zip(positions).enumerate()
    {
        rows += want.rows(tokens);
        let mut word = |contents| machine.of(step, segment, &contents).words()[0];
        assert_eq!(word(Contents::Position) as usize, start + tokens, "{name}, segment {segment}");
        if want != Want::Nothing {
            let next = [word(Contents::Token), word(Contents::Broken)];
            let logits = machine.of(step, 0, &Contents::Logits).floats();
            let expected = drawn[segment].token(&logits[(rows - 1) * vocab..rows * vocab]);
            assert_eq!(next, [expected, 0], "{name}, segment {segment}: {:?}", drawn[segment].params);
        }
    }
}

/// A step of sequences at positions, with random state and so many random tokens each, and how their next tokens are drawn.
fn prepared(machine: &mut Machine, segments: &[(usize, usize, Want)]) -> (Step, Vec<Drawn>) {
    let mut random = Rng::with_seed(segments.len() as u64);
    let feeds: Vec<_> = segments
        .iter()
        .map(|&(position, tokens, want)| {
            // Not the next multiple of a block.
            let sequence = machine.sequence(position + tokens + 3);
            machine.clear(sequence, position);
            (sequence, tokens, want)
        })
        .collect();
    let mut step = machine.step(&feeds);
    let mut drawn = Vec::new();
    for (segment, &(position, tokens, want)) in segments.iter().enumerate() {
        randomise(machine, &mut step, segment, position, &mut random);
        let vocab = machine.model.config.vocab_size as u32;
        let tokens: Vec<u32> = (0..tokens).map(|_| random.u32(0..vocab)).collect();
        let how = Drawn::random(machine.draws, position, &tokens, vocab as usize, &mut random);
        if want != Want::Nothing {
            let Draw { words, changes, mask } = how.draw(vocab as usize);
            machine.of(&mut step, segment, &Contents::Draw).put(words);
            machine.of(&mut step, segment, &Contents::Changes).put(changes);
            machine.of(&mut step, segment, &Contents::Mask).put(mask);
            machine.draws += 1;
        }
        drawn.push(how);
        machine.of(&mut step, segment, &Contents::Token).put(tokens);
    }
    (step, drawn)
}

/// Checks a whole step of such sequences.
fn check(name: &str, machine: &mut Machine, segments: &[(usize, usize, Want)], before: Before) {
    let (mut step, drawn) = prepared(machine, segments);
    let name = format!("{name}, {segments:?}");
    check_step(&name, machine, &mut step, before);
    let positions: Vec<usize> = segments.iter().map(|s| s.0).collect();
    check_end(&name, machine, &mut step, &positions, &drawn);
}

/// One token at each position, in every order.
fn check_tokens(name: &str, machine: &mut Machine, positions: &[usize]) {
    for (&position, order) in positions.iter().zip(ORDERS.into_iter().cycle()) {
        machine.order = order;
        check(name, machine, &[(position, 1, Want::Last)], &mut |_, _, _| {});
    }
}

/// Steps of several tokens, in every order.
fn check_batches(name: &str, machine: &mut Machine, steps: &[&[(usize, usize, Want)]]) {
    for (segments, order) in steps.iter().zip(ORDERS.into_iter().cycle()) {
        machine.order = order;
        check(name, machine, segments, &mut |_, _, _| {});
    }
}

fn nano() -> Model {
    Model::load(&folder("tests/data/nano/mlx-4bit"))
}

#[test]
fn each_kernel_computes_what_the_reference_does() {
    let nano = nano();
    check_tokens("nano", &mut nano.machine(KvType::Bf16, Guard::Start), &[0, 1, 130, 131]);
}

#[test]
fn each_kernel_of_a_batch_computes_what_the_reference_does() {
    let nano = nano();
    let mut machine = nano.machine(KvType::Bf16, Guard::End);
    let draft: &[_] = &[(130, 3, Want::All)];
    let mixed: &[_] = &[(0, 11, Want::Last), (40, 1, Want::Nothing)];
    check_batches("nano", &mut machine, &[draft, mixed]);
}

/// Matrices of bf16, and of 4 bits with routers of bf16.
#[test]
fn each_kernel_of_a_model_in_bf16_computes_what_the_reference_does() {
    for (all, name) in [(true, "bf16"), (false, "bf16 routers")] {
        let model = unquantised(all, 5);
        let mut machine = model.machine(KvType::F32, Guard::End);
        check_tokens(name, &mut machine, &[0, 70]);
        let chunk: &[_] = &[(60, 70, Want::Last)];
        let few: &[_] = &[(3, 4, Want::All), (0, 1, Want::Last)];
        let some: &[_] = &[(31, 18, Want::Last)];
        check_batches(name, &mut machine, &[chunk, few, some]);
        machine = model.machine(KvType::F32, Guard::Start);
        check_batches(name, &mut machine, &[few, some]);
        check_batches(name, &mut model.machine(TENSOR_F32, Guard::End), &[chunk, some]);
    }
}

#[test]
fn each_kernel_with_tensor_operations_computes_what_the_reference_does() {
    let nano = nano();
    let mut machine = nano.machine(TENSOR, Guard::End);
    let chunk: &[_] = &[(31, 37, Want::Last)];
    let mixed: &[_] = &[(0, 11, Want::All), (40, 1, Want::Nothing), (5, 3, Want::Last)];
    check_batches("nano", &mut machine, &[chunk, mixed]);
}

/// Weights as tensor operations multiply them: codes times scales, and biases, rounded once.
#[test]
fn tensor_operations_round_a_weight_once() {
    const OUTS: usize = 128;
    const COLS: usize = 64;
    let (nano, mut random) = (nano(), Rng::with_seed(4));
    let kernels = nano.machine(TENSOR, Guard::End).kernels;
    let bf16s = |values: &[f32]| -> Vec<u32> {
        values
            .as_chunks::<2>()
            .0
            .iter()
            .map(|p| p.map(|x| u32::from(bf16::from_f32(x).to_bits())))
            .map(|[a, b]| a | b << 16)
            .collect()
    };
    let rounded = |x: f32| bf16::from_f32(x).to_f32();
    // Of all sizes; a group's bias is one of its values, as MLX quantises, or 0, or so small that the sums are not exact.
    let scales: Vec<f32> =
        (0..OUTS).map(|i| rounded((1.0 + random.f32()) * 2f32.powi(i as i32 % 20 - 12))).collect();
    let steps = |i: usize| if i % 17 == 16 { 0.01 } else { (i % 17) as f32 };
    let biases: Vec<f32> = scales.iter().enumerate().map(|(i, s)| rounded(-s * steps(i))).collect();
    let codes: Vec<u32> = (0..OUTS * COLS / 8).map(|_| random.u32(..)).collect();
    let memory = |words: Vec<u32>| kernels.allocate(4 * words.len(), Guard::End).with(words);
    for (half, order) in ORDERS[..2].iter().enumerate() {
        // Each row is 1 in one place.
        let inputs = (0..32 * COLS / 2).map(|i| match i % (COLS / 2) * 2 {
            at if at == half * 32 + i / (COLS / 2) => 0x3c00,
            at if at + 1 == half * 32 + i / (COLS / 2) => 0x3c00_0000,
            _ => 0,
        });
        let mut memories = [
            memory(inputs.collect()),
            memory(codes.clone()),
            memory(bf16s(&scales)),
            memory(bf16s(&biases)),
            memory(vec![32, COLS as u32, OUTS as u32, 0]),
            kernels.allocate(4 * 32 * OUTS, Guard::End),
        ];
        let shape = Shape { kernel: "matmul_tensor_32", grid: [1; 3], threads: 128, memory: &[16_384] };
        let bound: Vec<_> = (0..memories.len()).map(|i| (i, 0)).collect();
        kernels.launch(shape, &mut memories, &bound, *order).unwrap();
        for (i, got) in memories[5].floats().into_iter().enumerate() {
            let (row, out) = (half * 32 + i / OUTS, i % OUTS);
            let code = codes[(out * COLS + row) / 8] >> (row % 8 * 4) & 15;
            let exact = scales[out] * code as f32 + biases[out];
            let expected = f16::from_f32(exact).to_f32();
            let small = steps(out) == 0.01;
            let most = exact.abs() / 2048.0 + scales[out] / 16384.0;
            assert!(got == expected || small && (got - exact).abs() <= most, "{got}, expected {expected}");
        }
    }
}

/// Positions: the first ones, on both sides of an edge between parts, and with all parts in use.
#[test]
#[ignore = "a minute: shapes at the edges, more positions"]
fn each_kernel_computes_what_the_reference_does_at_edge_shapes() {
    for (name, model) in edge_shapes() {
        check_tokens(name, &mut model.machine(KvType::F32, Guard::End), &[0, 3, 63, 64, 2530]);
        check_tokens(name, &mut model.machine(KvType::Bf16, Guard::Start), &[2, 127, 128]);
    }
}

/// Chunks around the sizes of tiles and blocks, at positions around those of blocks; sequences with a token each; drafts; all
/// of it in one step.
const BATCHES: [&[(usize, usize, Want)]; 9] = [
    &[(0, 65, Want::Last)],
    &[(31, 33, Want::Nothing)],
    &[(32, 32, Want::Last)],
    &[(2100, 9, Want::All)],
    &[(64, 8, Want::Last)],
    &[(1, 2, Want::All), (63, 3, Want::Last)],
    &[(0, 1, Want::Last), (2100, 1, Want::Last), (31, 1, Want::Nothing)],
    &[(5, 1, Want::Nothing)],
    &[(30, 1, Want::Last), (96, 17, Want::Nothing), (3, 4, Want::All), (700, 1, Want::Last)],
];

#[test]
#[ignore = "a quarter of an hour: shapes at the edges, more batches"]
fn each_kernel_of_a_batch_computes_what_the_reference_does_at_edge_shapes() {
    for (name, model) in edge_shapes() {
        // Wide models take long: each kernel once.
        let wide = matches!(name, "wide" | "real");
        let steps = if wide { &BATCHES[5..] } else { &BATCHES[..] };
        check_batches(name, &mut model.machine(KvType::F32, Guard::End), steps);
        let steps = if wide { &BATCHES[5..6] } else { &BATCHES[3..6] };
        check_batches(name, &mut model.machine(KvType::Bf16, Guard::Start), steps);
    }
}

#[test]
#[ignore = "minutes: shapes at the edges, with tensor operations"]
fn each_kernel_with_tensor_operations_computes_what_the_reference_does_at_edge_shapes() {
    for (name, model) in edge_shapes() {
        // Wide models take long: each kernel once.
        let wide = matches!(name, "wide" | "real");
        let steps = if wide { &BATCHES[8..] } else { &BATCHES[..4] };
        check_batches(name, &mut model.machine(TENSOR, Guard::Start), steps);
        let steps = if wide { &BATCHES[..0] } else { &BATCHES[7..] };
        check_batches(name, &mut model.machine(TENSOR_F32, Guard::End), steps);
    }
}

#[test]
#[ignore = "four minutes, 21 GB: long contexts"]
fn attention_is_right_at_far_positions() {
    let nano = nano();
    let mut machine = nano.machine(KvType::F32, Guard::End);
    let draft: &[_] = &[(262_137, 4, Want::Last)];
    let chunk: &[_] = &[(131_070, 9, Want::Nothing)];
    check_batches("nano", &mut machine, &[draft, chunk]);
    check_tokens("nano", &mut machine, &[262_143]);
    check_batches("nano", &mut nano.machine(TENSOR, Guard::End), &[chunk]);
}

/// Before the launches of a kernel, other numbers come into one of its buffers.
fn put(
    kernel: &'static str,
    name: &'static str,
    values: impl Fn(usize) -> f32,
) -> impl FnMut(&Launch, &mut Machine, &mut Step) {
    move |launch, machine, step| {
        // Whatever its outputs are kept as.
        if launch.kernel.trim_end_matches("_half").trim_end_matches("_both") == kernel {
            let memory = machine.of(step, 0, &Contents::Scratch(name));
            let all: Vec<f32> = (0..memory.bytes / 4).map(&values).collect();
            memory.put_floats(&all);
        }
    }
}

/// All tokens take the same experts, then others; equal logits; experts that no token takes.
#[test]
fn experts_may_be_crowded_or_unused() {
    let nano = nano();
    let experts = nano.config.moe.experts;
    for features in [KvType::F32.into(), TENSOR_F32] {
        let mut machine = nano.machine(features, Guard::End);
        let crowded = &mut put("route", "router_logits", |i| (i % experts) as f32);
        check("crowded", &mut machine, &[(0, 70, Want::Nothing)], crowded);
        let equal = &mut put("route", "router_logits", |_| 0.5);
        check("equal", &mut machine, &[(0, 33, Want::Nothing)], equal);
    }
}

#[test]
fn values_may_be_very_large_or_small() {
    let nano = nano();
    for features in [KvType::F32.into(), TENSOR_F32] {
        let mut machine = nano.machine(features, Guard::End);
        let scale = |i: usize| [1e-18f32, 1e12, -1e15, 3e-7, 1.0][i / 64 % 5] * (1.0 + (i % 13) as f32);
        let mut before = put("norm_rows", "x", scale);
        check("scales", &mut machine, &[(7, 10, Want::All)], &mut before);
        check("scales", &mut machine, &[(7, 5, Want::All)], &mut before);
    }
}

/// The barriers of a text, and which of them lie in `sample.metal`.
fn barriers(text: &str) -> Vec<(Call<'_>, bool)> {
    let of_draws =
        text.find("// How a token is drawn").unwrap()..text.find("// `lm_head` and `finish`").unwrap();
    let calls = removed::calls(text, &["threadgroup_barrier"]).into_iter();
    calls.map(|call| (call.clone(), of_draws.contains(&call.at.start))).collect()
}

/// Whether a check of a mutant fails for values, in one order of threads or another, and for a race.
fn found(mutant: &Kernels, check: &mut dyn FnMut()) -> [bool; 2] {
    let mut problem = || {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut *check)).err()?;
        Some(panic.downcast_ref::<String>().cloned().unwrap_or_default())
    };
    let races = problem().is_some_and(|why| why.contains("a race on"));
    mutant.ignore_races();
    [problem().is_some(), races]
}

/// Those barriers of a text, by number from `first` on, that can be removed unseen: without which no value is wrong, and without
/// which there is no race; and how many barriers there are in all. Those of draws are left out.
fn survivors(
    model: &Model,
    features: Features,
    first: usize,
    check: impl Fn(&mut Machine),
) -> ([Vec<usize>; 2], usize) {
    let source = source::source(&model.config, features);
    let barriers = barriers(&source);
    let mut survivors = [Vec::new(), Vec::new()];
    for (i, (call, _)) in barriers.iter().enumerate().skip(first).filter(|(_, (_, of_draws))| !of_draws) {
        let mut machine = model.machine_of(&removed::without(&source, call), features, Guard::End);
        let found = found(machine.kernels, &mut || check(&mut machine));
        for (_, survivors) in found.iter().zip(&mut survivors).filter(|(found, _)| !**found) {
            survivors.push(i);
        }
    }
    (survivors, barriers.len())
}

/// From more groups of logits than one SIMD-group has.
#[test]
#[ignore = "a minute: compiles the kernels once for each barrier"]
fn every_barrier_of_a_draw_is_needed() {
    let config = draws::config(2000);
    let text = source::source(&config, KvType::F32);
    let barriers: Vec<_> = barriers(&text).into_iter().filter(|b| b.1).map(|b| b.0).collect();
    assert_eq!(barriers.len(), 7);
    for call in barriers {
        let mut drawer = Drawer::new(&config, &removed::without(&text, &call));
        let found = found(drawer.kernels, &mut || drop(drawer.check(60, 1)));
        assert_eq!(
            found, [true; 2],
            "the barrier in line {} can be removed unseen: by values, by races",
            call.line_number
        );
    }
}

/// Without any one of their barriers the kernels are wrong, in one order of threads or another, and the checks above see it; and
/// there is a race.
#[test]
#[ignore = "minutes: compiles the kernels once for each barrier"]
fn every_barrier_is_needed() {
    let steps: [&[_]; 3] = [&[(0, 65, Want::Last)], &[(2103, 17, Want::Last)], &[(61, 33, Want::Last)]];
    let ([values, races], all) = survivors(&nano(), KvType::F32.into(), 0, |machine| {
        check_tokens("mutant", machine, &[130, 131, 2100]);
        check_batches("mutant", machine, &steps);
    });
    assert_eq!(all, 30);
    assert!(values.is_empty(), "barriers without which values are right, of all in order: {values:?}");
    assert!(races.is_empty(), "barriers without which there is no race, of all in order: {races:?}");
}

/// The same of the kernels that are added for tensor operations.
#[test]
#[ignore = "minutes: compiles the kernels once for each barrier"]
fn every_barrier_of_tensor_operations_is_needed() {
    let steps: [&[_]; 3] = [&[(0, 65, Want::Last)], &[(2100, 17, Want::Last)], &[(60, 33, Want::Last)]];
    // Nano's rows are brought at once.
    let model = random(&[("hidden_size", 128.into())], 9);
    let ([values, races], all) =
        survivors(&model, TENSOR, 30, |machine| check_batches("mutant", machine, &steps));
    assert_eq!(all, 39);
    assert!(values.is_empty(), "barriers without which values are right, of all in order: {values:?}");
    assert!(races.is_empty(), "barriers without which there is no race, of all in order: {races:?}");
}

/// Steps that launch every kernel.
fn steps() -> [Vec<Segment>; 4] {
    let segment = |tokens, want| Segment { tokens, capacity: 128, want };
    [
        vec![segment(1, Want::Last)],
        vec![segment(4, Want::Last), segment(1, Want::Nothing)],
        vec![segment(20, Want::Last)],
        vec![segment(100, Want::Nothing), segment(1, Want::Last), segment(9, Want::All)],
    ]
}

/// The plan and the kernels' own text agree on buffers, threadgroup memory, threads, and what is written.
#[test]
fn launches_are_bound_as_the_kernels_signatures_say() {
    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    let signatures = signatures(&source::source(&config, TENSOR)).unwrap();
    let plan = |features| steps().map(|segments| plan_step(&config, features, &segments).unwrap());
    let plans = [plan(KvType::Bf16.into()), plan(TENSOR)].concat();
    let launches: Vec<&Launch> = plans.iter().flat_map(|plan| &plan.launches).collect();
    for launch in &launches {
        check_signature(launch, signatures.iter().find(|s| s.name == launch.kernel).unwrap());
    }
    for Signature { name, .. } in &signatures {
        assert!(launches.iter().any(|l| l.kernel == name), "{name} is never launched");
    }
}

fn check_signature(launch: &Launch, signature: &Signature) {
    let kernel = launch.kernel;
    assert_eq!(signature.threads, launch.threads, "{kernel}");
    let (mut buffers, mut memory) = (0, 0);
    for parameter in &signature.parameters {
        match parameter {
            Parameter::Buffer { index, writable } => {
                assert_eq!(
                    (*index, *writable),
                    (buffers, launch.bindings[buffers].access != Access::Read),
                    "{kernel}"
                );
                buffers += 1;
            }
            Parameter::Threadgroup { index } => {
                assert_eq!(*index, memory);
                memory += 1;
            }
            Parameter::BuiltIn(_) => {}
        }
    }
    assert_eq!((buffers, memory), (launch.bindings.len(), launch.threadgroup_memory.len()), "{kernel}");
}

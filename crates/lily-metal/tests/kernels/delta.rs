//! The delta rule of a layer: token by token, chunk by chunk, and behind what is pending.

use lily_metal::plan::{KvType, Launch, SETTLE_EVERY, Want};
use lily_metal::source;

use super::common::machine::Machine;
use super::common::model::{edge_shapes, random};
use super::common::{Guard, ORDERS};
use super::{Before, check_step, nano, prepared, put};

/// Sequences whose delta rule goes chunk by chunk: whole chunks, parts of them, two beside each other and one that is too short.
const CHUNKED: [&[(usize, usize, Want)]; 3] = [
    &[(0, 70, Want::Last)],
    &[(2, 33, Want::Nothing), (50, 17, Want::Last), (7, 5, Want::Nothing)],
    &[(130, 16, Want::Nothing)],
];

/// Checks the step's first layer, up to its delta rule.
fn check_delta(name: &str, machine: &mut Machine, segments: &[(usize, usize, Want)], before: Before) {
    let (mut step, _) = prepared(machine, segments);
    let is_behind = |l: &Launch| matches!(l.kernel, "keep_inputs" | "norm_heads" | "out_gdn");
    let last = step.plan.launches.iter().position(is_behind).unwrap();
    step.plan.launches.truncate(last);
    check_step(&format!("{name}, {segments:?}"), machine, &mut step, before);
}

/// Tokens, drafts and a chunk behind every number of pending tokens: those that fit into the log, those that just don't, and more. Nano
/// has a key head for two value heads and their columns in one block; the other model one for each, and two blocks.
fn check_pending(name: &str, machine: &mut Machine) {
    for pending in 0..SETTLE_EVERY {
        for (tokens, order) in [1, 2, 3, 5, 17].into_iter().zip(ORDERS.into_iter().cycle()) {
            machine.order = order;
            let position = 8 * SETTLE_EVERY + pending;
            check_delta(name, machine, &[(position, tokens, Want::Last)], &mut |_, _, _| {});
        }
    }
}

#[test]
fn the_delta_rule_goes_on_behind_what_is_pending() {
    check_pending("nano", &mut nano().machine(KvType::F32, Guard::End));
    let other = random(&[("linear_num_key_heads", 4.into()), ("linear_value_head_dim", 64.into())], 3);
    check_pending("two blocks", &mut other.machine(KvType::F32, Guard::End));
}

/// Each text in place of the other is a mistake with the log, and found.
#[test]
#[ignore = "a minute: compiles the kernels once for each mistake"]
fn mistakes_with_the_log_are_found() {
    let mistakes = [
        // Replayed backwards; with another head's keys, error or decay.
        ("for (uint token = 0; token < pending; ++token)", "for (uint token = pending; token-- > 0;)"),
        ("head / SHARED_KEYS * KEY_DIM + first", "first"),
        ("LOG_ERRORS + head * VALUE_DIM + column];", "LOG_ERRORS + column];"),
        ("LOG_DECAYS + head];", "LOG_DECAYS];"),
        // Put where another token's is, or behind the end; without its norm or its decay; twice at once.
        ("log + (before + row) * LOG_ENTRY", "log + row * LOG_ENTRY"),
        ("before + rows[0] >= SETTLE_EVERY", "before + rows[0] > SETTLE_EVERY"),
        ("+ i] = k[i] * k_factor;", "+ i] = k[i];"),
        ("entry[LOG_DECAYS + head] = alpha;", "entry[LOG_DECAYS + head] = 1.0f;"),
        (
            "i < KEY_DIM && group.x == 0 && head % SHARED_KEYS == 0; i += LANES * DELTA_SIMDGROUPS) {\n                entry",
            "i < KEY_DIM && group.x == 0; i += LANES * DELTA_SIMDGROUPS) {\n                entry",
        ),
        // Kept when the state has it; not in the state that the draft's next token meets, or in a part of it.
        ("= settles ? 0 : before + rows[0];", "= before + rows[0];"),
        ("*own = 0;", "*own = count;"),
        ("if (settles || row + 1 < rows[0]) {", "if (settles) {"),
        ("first += CHUNKS_SIMDGROUPS * STATE_ROWS", "first += KEY_DIM"),
    ];
    let nano = nano();
    let text = source::source(&nano.config, KvType::F32);
    for (right, wrong) in mistakes {
        assert_eq!(text.matches(right).count(), 1, "{right}");
        let mut machine = nano.machine_of(&text.replace(right, wrong), KvType::F32, Guard::End);
        let check = std::panic::AssertUnwindSafe(|| check_pending("a mistake", &mut machine));
        assert!(std::panic::catch_unwind(check).is_err(), "{wrong}");
    }
}

#[test]
fn the_delta_rule_of_a_chunk_is_that_of_its_tokens_one_by_one() {
    let nano = nano();
    let mut machine = nano.machine(KvType::F32, Guard::End);
    for (segments, order) in CHUNKED.iter().zip(ORDERS) {
        machine.order = order;
        check_delta("nano", &mut machine, segments, &mut |_, _, _| {});
    }
}

#[test]
#[ignore = "minutes: every length, shapes at the edges"]
fn the_delta_rule_of_a_chunk_is_right_for_every_length_and_shape() {
    let nano = nano();
    let mut machine = nano.machine(KvType::F32, Guard::Start);
    for n in 16..=65 {
        check_delta("nano", &mut machine, &[(n % 5, n, Want::Nothing)], &mut |_, _, _| {});
    }
    for (name, model) in edge_shapes() {
        check_delta(name, &mut model.machine(KvType::F32, Guard::End), CHUNKED[1], &mut |_, _, _| {});
    }
}

/// Before the first launch of the delta rule, and so in what it is compared with, gates and keys are others.
#[test]
fn the_delta_rule_of_a_chunk_may_forget_all_or_nothing() {
    let nano = nano();
    let mut machine = nano.machine(KvType::F32, Guard::End);
    let segments = [(9, 61, Want::Nothing)];
    let mut check = |name: &str, scratch, values: &dyn Fn(usize) -> f32| {
        check_delta(name, &mut machine, &segments, &mut put("prepare_chunks", scratch, values));
    };
    let heads = nano.config.gdn.value_heads;
    // Decays of exactly 0 and 1, and both in turn; numbers that are lost in a sum of logarithms behind others.
    let gates: [&[f32]; 6] =
        [&[1e4], &[-1e4], &[1e4, -1e4], &[90.0, -4.0, -3.0, 2.0, -7.0], &[1e30, -9.0], &[-3.0, 88.0, -88.0]];
    for gates in gates {
        check(&format!("a of {gates:?}"), "a", &|i| gates[i / heads % gates.len()]);
    }
    check("all errors are written", "b", &|_| 1e4);
    check("none are", "b", &|_| -1e4);
    let channels = nano.config.gdn.conv_channels();
    // Equal keys, and keys of opposite signs in turn: the inverse of the triangle is as large as it can be.
    check("equal keys", "qkv", &|i| (i % channels % 7) as f32 - 3.0);
    check("keys of zeros", "qkv", &|_| 0.0);
}

/// Equal keys that all write and forget nothing, or little.
#[test]
fn the_delta_rule_of_a_chunk_of_equal_keys_is_stable() {
    let nano = nano();
    let mut machine = nano.machine(KvType::F32, Guard::End);
    let channels = nano.config.gdn.conv_channels();
    for a in [-1e4, -6.0] {
        let mut gates = put("prepare_chunks", "a", |_| a);
        let mut strengths = put("prepare_chunks", "b", |_| 1e4);
        let mut inputs =
            put("prepare_chunks", "qkv", |i| (i % channels % 7) as f32 - 3.0 + (i % 11) as f32 * 1e-3);
        check_delta("equal keys", &mut machine, &[(0, 64, Want::Nothing)], &mut |launch, machine, step| {
            gates(launch, machine, step);
            strengths(launch, machine, step);
            inputs(launch, machine, step);
        });
    }
}

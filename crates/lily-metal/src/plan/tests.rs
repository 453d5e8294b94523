//! What holds of every plan.

use std::collections::{HashMap, HashSet};

use lily_model::footprint::Footprint;
use lily_model::presets::CONFIG_35B_A3B;

use super::*;

fn config() -> Config {
    Config::from_json(CONFIG_35B_A3B).unwrap()
}

fn step(segments: &[(usize, Want)]) -> Plan {
    step_of(KvType::Bf16, segments)
}

fn step_of(features: impl Into<Features>, segments: &[(usize, Want)]) -> Plan {
    let segment = |&(tokens, want)| Segment { tokens, capacity: 4096, want };
    let segments: Vec<Segment> = segments.iter().map(segment).collect();
    plan_step(&config(), features, &segments).unwrap()
}

/// With the tensor operations of Metal 4.
const TENSOR: Features = Features { kv: KvType::Bf16, tensor: true };

fn real() -> (Config, Plan) {
    (config(), plan(&config(), 4096, KvType::Bf16).unwrap())
}

/// Steps of every kind, with the kernels of every device and with tensor operations.
fn plans() -> Vec<Plan> {
    let eight = [(1, Want::Last); 8];
    let kinds: [&[(usize, Want)]; 7] = [
        &[(1, Want::Last)],
        &[(512, Want::Nothing)],
        &[(20, Want::All)],
        &[(8, Want::All)],
        &eight,
        &[(1, Want::Last), (300, Want::Nothing), (3, Want::All), (1, Want::Last)],
        &[(1, Want::Nothing)],
    ];
    [Features::from(KvType::Bf16), TENSOR]
        .into_iter()
        .flat_map(|f| kinds.map(|kind| step_of(f, kind)))
        .collect()
}

/// However its successor is drawn: no plan depends on that.
#[test]
fn a_token_of_the_real_model_takes_at_most_270_kernels_and_stages() {
    let (_, plan) = real();
    assert_eq!((plan.launches.len(), plan.stages()), (253, 253));
}

/// A chunk of a prompt, a draft, eight sequences: as docs/lab/metal.md says.
#[test]
fn steps_of_more_tokens_take_few_stages() {
    let size = |segments: &[(usize, Want)]| {
        let plan = step(segments);
        let scratch = plan.buffers.iter().filter(|b| matches!(b.contents, Contents::Scratch(_)));
        let scratch: usize = scratch.map(|b| b.bytes).sum();
        println!("{segments:?}: {} bytes moved, {scratch} of scratch", plan.bytes());
        (plan.launches.len(), plan.stages())
    };
    assert_eq!(size(&[(512, Want::All)]), (705, 525));
    assert_eq!(size(&[(512, Want::Last)]), (700, 521));
    assert_eq!(size(&[(512, Want::Nothing)]), (691, 512));
    assert_eq!(size(&[(2048, Want::Nothing)]), (691, 512));
    // Too few for chunks of the delta rule.
    assert_eq!(size(&[(15, Want::Last)]), (670, 491));
    assert_eq!(size(&[(8, Want::All)]), (475, 335));
    assert_eq!(size(&[(1, Want::Last); 8]), (813, 325));
    assert_eq!(size(&[(1, Want::Last); 2]), (489, 325));
}

/// Nothing behind the state of the last layer is computed for tokens whose logits nobody wants: a chunk inside of a prompt ends with
/// its keys and values.
#[test]
fn the_last_layer_is_for_wanted_tokens() {
    let last = |segments: &[(usize, Want)]| {
        let plan = step(segments);
        let count = |kernel: &str| plan.launches.iter().filter(|l| l.kernel == kernel).count();
        let tokens = plan.launches.iter().filter(|l| l.kernel == "gate_up").map(|l| l.grid[2]);
        (count("append"), count("attend_rows"), count("gate_up_rows"), tokens.collect::<Vec<_>>())
    };
    assert_eq!(last(&[(512, Want::Nothing)]), (10, 9, 39, vec![]));
    assert_eq!(last(&[(512, Want::Last)]), (10, 10, 39, vec![1]));
    assert_eq!(last(&[(512, Want::All)]), (10, 10, 40, vec![]));
    assert_eq!(last(&[(1, Want::Last), (1, Want::Last), (300, Want::Nothing)]), (10, 10, 39, vec![2]));
    // From the first to the last of them.
    assert_eq!(last(&[(20, Want::Last), (6, Want::Last), (20, Want::Nothing)]), (30, 30, 39, vec![7]));
    assert_eq!(last(&[(5, Want::Last), (20, Want::Last)]), (20, 20, 40, vec![]));
}

/// What is launched for segments of their own runs together, so that more of them don't make more stages.
#[test]
fn sequences_do_not_wait_for_each_other() {
    let stages = |segments: &[(usize, Want)]| step(segments).stages();
    assert_eq!(stages(&[(1, Want::Last); 2]), stages(&[(1, Want::Last); 8]));
    assert_eq!(stages(&[(64, Want::All)]), stages(&[(40, Want::All), (16, Want::All), (8, Want::All)]));
    // A barrier stands wherever the stage is another.
    for plan in plans() {
        let barriers = plan.launches.chunk_by(|a, b| a.stage == b.stage).count();
        assert_eq!(barriers, plan.stages());
    }
}

/// Tensor operations take the place of other kernels, in the same stages; a token and a draft are as without them.
#[test]
fn tensor_operations_are_for_steps_of_many_tokens() {
    let tensors = |plan: &Plan| {
        let names = plan.launches.iter().map(|l| l.kernel).filter(|k| k.contains("_tensor"));
        names.collect::<std::collections::BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    for (tokens, expected) in [
        (1, &[][..]),
        (8, &[]),
        (9, &["attend_tensor", "down_tensor", "gate_up_tensor", "matmul_tensor_32"]),
        (512, &["attend_tensor", "down_tensor", "gate_up_tensor", "matmul_tensor"]),
    ] {
        let segments = [(tokens, Want::All)];
        let (with, without) = (step_of(TENSOR, &segments), step(&segments));
        assert_eq!(tensors(&with), expected);
        assert!(tensors(&without).is_empty());
        // And inputs of experts are gathered.
        let gathers = with.launches.iter().filter(|l| l.kernel == "gather_pairs").count();
        let without_gathers = (with.launches.len() - gathers, with.stages() - gathers);
        assert_eq!(without_gathers, (without.launches.len(), without.stages()));
        assert_eq!(
            (with.bytes(), with.bytes_per_position()),
            (without.bytes(), without.bytes_per_position())
        );
    }
    // They take no keys of 32 bits.
    let features = Features { kv: KvType::F32, tensor: true };
    let kernels = tensors(&step_of(features, &[(512, Want::Nothing)]));
    assert_eq!(kernels, ["down_tensor", "gate_up_tensor", "matmul_tensor"]);
}

/// Bytes that a token must move: what state says of it has to be written some day, but not for every token.
fn least(f: &Footprint) -> u64 {
    f.read_per_token() + 4 * f.recurrent_values + 2 * 4 * f.conv_values
}

#[test]
fn a_token_moves_little_more_than_it_must() {
    let (config, plan) = real();
    let f = Footprint::new(&config);
    let ratio = plan.bytes() as f64 / least(&f) as f64;
    println!("{} bytes, {ratio:.4} times what must be", plan.bytes());
    assert!((1.0..1.05).contains(&ratio), "{ratio}");
    assert_eq!(plan.bytes_per_position(), 2 * f.kv_values_per_token);
}

/// However many tokens are read together, a matrix is read once.
#[test]
fn a_batch_reads_every_matrix_once() {
    let config = config();
    let f = Footprint::new(&config);
    let state = 2 * 4 * (f.recurrent_values + f.conv_values);
    let chunk = step(&[(512, Want::All)]);
    // All of the file but the embedding, of which 512 rows are read; what else moves is state and new keys and values.
    let embedding = (config.vocab_size * config.hidden_size * 9 / 16) as u64;
    let most = f.stored() - embedding + state + 512 * (2 * f.kv_values_per_token + 2048);
    let ratio = chunk.bytes() as f64 / most as f64;
    println!("{} bytes, {ratio:.4} times what must be", chunk.bytes());
    assert!((0.99..1.01).contains(&ratio), "{ratio}");
    assert_eq!(chunk.bytes_per_position(), 2 * f.kv_values_per_token);
}

/// What a launch touches conflicts with another's if one of them writes it.
fn conflict(a: &Launch, b: &Launch) -> bool {
    let meet = |a: &Binding, b: &Binding| {
        let (first, second) = (a.range(), b.range());
        let together = first.start.max(second.start) < first.end.min(second.end);
        a.buffer == b.buffer && together && (a.access.writes() || b.access.writes())
    };
    a.bindings.iter().any(|a| b.bindings.iter().any(|b| meet(a, b)))
}

#[test]
fn stages_follow_from_reads_and_writes() {
    for plan in plans() {
        for (i, launch) in plan.launches.iter().enumerate() {
            let before = plan.launches[..i].iter().filter(|other| conflict(other, launch));
            let needed = before.map(|other| other.stage + 1).max().unwrap_or(1);
            // The projection z of chunks is ready before it is launched.
            let waits = launch.stage > needed && launch.stage == plan.launches[i - 1].stage;
            let is_z =
                launch.bindings.iter().any(|b| plan.buffers[b.buffer].contents == Contents::Scratch("z"));
            assert!(launch.stage == needed || waits && is_z, "launch {i}, {}", launch.kernel);
        }
    }
}

/// Whether bytes of a buffer were all written.
fn covered(written: &[Range<usize>], bytes: Range<usize>) -> bool {
    let mut at = bytes.start;
    while let Some(range) = written.iter().find(|r| r.contains(&at)) {
        at = range.end;
    }
    at >= bytes.end
}

#[test]
fn everything_that_is_read_was_written_or_is_there_from_the_start() {
    for plan in plans() {
        let mut written: HashMap<usize, Vec<Range<usize>>> = HashMap::new();
        for launch in &plan.launches {
            for b in launch.bindings.iter().filter(|b| b.access.reads()) {
                let contents = &plan.buffers[b.buffer].contents;
                let must = matches!(contents, Contents::Scratch(_) | Contents::Logits | Contents::Broken);
                let is = written.get(&b.buffer).is_some_and(|w| covered(w, b.range()));
                assert!(!must || is, "{} reads {contents:?}", launch.kernel);
            }
            for b in launch.bindings.iter().filter(|b| b.access.writes()) {
                written.entry(b.buffer).or_default().push(b.range());
            }
        }
        let may = |c: &Contents| {
            !matches!(
                c,
                Contents::Codes(_)
                    | Contents::Scales(_)
                    | Contents::Biases(_)
                    | Contents::Vector(_)
                    | Contents::Turns
                    | Contents::Numbers(_)
            )
        };
        assert!(written.keys().all(|&b| may(&plan.buffers[b].contents)), "constants are written");
    }
}

#[test]
fn launches_keep_to_the_limits_of_the_device() {
    for plan in plans() {
        for l in &plan.launches {
            assert!(l.threads.is_multiple_of(LANES) && l.threads <= MOST_THREADS, "{}", l.kernel);
            assert!(l.threadgroup_memory.iter().sum::<usize>() <= THREADGROUP_MEMORY, "{}", l.kernel);
            let aligned = |n: &usize| n.is_multiple_of(THREADGROUP_MEMORY_ALIGNMENT);
            assert!(l.threadgroup_memory.iter().all(aligned), "{}", l.kernel);
            assert!(l.grid.iter().all(|&n| n > 0), "{}", l.kernel);
            assert!(l.bindings.len() <= MOST_BUFFERS, "{}", l.kernel);
            let buffers: HashSet<_> = l.bindings.iter().map(|b| b.buffer).collect();
            assert_eq!(buffers.len(), l.bindings.len(), "{} has a buffer twice", l.kernel);
            for b in &l.bindings {
                let Buffer { bytes, .. } = plan.buffers[b.buffer];
                let inside = b.offset.is_multiple_of(4) && b.length > 0 && b.range().end <= bytes;
                assert!(inside, "{} is bound to {:?} of {bytes}", l.kernel, b.range());
            }
        }
    }
}

#[test]
fn what_is_a_sequences_own_belongs_to_its_segment() {
    let plan = step(&[(1, Want::Last), (5, Want::Nothing)]);
    for segment in [0, 1] {
        let own = [Contents::Token, Contents::Position, Contents::State(0, State::Recurrent)];
        assert!(own.iter().all(|c| plan.buffer_of(segment, c).is_some()));
    }
    let shared = |b: &&Buffer| matches!(b.contents, Contents::Scratch(_) | Contents::Codes(_));
    assert!(plan.buffers.iter().filter(shared).all(|b| b.segment == 0));
}

#[test]
fn segments_that_make_no_step_are_refused() {
    let refused = |tokens: &[(usize, usize)]| {
        let segment = |&(tokens, capacity)| Segment { tokens, capacity, want: Want::Last };
        let segments: Vec<Segment> = tokens.iter().map(segment).collect();
        plan_step(&config(), KvType::Bf16, &segments).unwrap_err().to_string()
    };
    assert_eq!(refused(&[]), "a step can't be planned: it has no segments, expected at least one");
    let e = refused(&[(1, 8), (0, 8)]);
    assert_eq!(e, "a step can't be planned: segment 1 has 0 tokens, expected 1 to its capacity of 8");
    let e = refused(&[(9, 8)]);
    assert_eq!(e, "a step can't be planned: segment 0 has 9 tokens, expected 1 to its capacity of 8");
    let e = refused(&[(40_000, 40_000), (40_000, 40_000)]);
    assert_eq!(e, "a step can't be planned: it has 80000 tokens, expected at most 65536");
}

#[test]
fn every_weight_is_used() {
    let (config, plan) = real();
    for module in modules(&config) {
        let name = module.name.clone();
        let found =
            [Contents::Codes(name.clone()), Contents::Vector(name)].map(|c| plan.buffer(&c).is_some());
        assert!(found.contains(&true), "{}", module.name);
    }
    // Codes, scales and biases as in the file; vectors as f32 instead of bf16.
    let vectors = plan.buffers.iter().filter(|b| matches!(b.contents, Contents::Vector(_)));
    let vectors: usize = vectors.map(|b| b.bytes).sum();
    let matrices = plan
        .buffers
        .iter()
        .filter(|b| matches!(b.contents, Contents::Codes(_) | Contents::Scales(_) | Contents::Biases(_)));
    let matrices: usize = matrices.map(|b| b.bytes).sum();
    assert_eq!((matrices + vectors / 2) as u64, Footprint::new(&config).stored());
}

/// Of bf16 values or with quantised matrices: as many bytes as the file has, and the same launches.
#[test]
fn a_token_of_a_model_in_bf16_takes_the_same_launches() {
    let config = Config { quantization: None, ..config() };
    let plan = plan(&config, 4096, KvType::Bf16).unwrap();
    let f = Footprint::new(&config);
    let ratio = plan.bytes() as f64 / least(&f) as f64;
    println!("{} bytes, {ratio:.4} times what must be", plan.bytes());
    assert!((1.0..1.05).contains(&ratio), "{ratio}");
    let kernels = |plan: &Plan| plan.launches.iter().map(|l| l.kernel).collect::<Vec<_>>();
    assert_eq!(kernels(&plan), kernels(&real().1));
    assert!(plan.buffers.iter().all(|b| !matches!(b.contents, Contents::Scales(_) | Contents::Biases(_))));
}

#[test]
fn models_that_the_kernels_are_not_written_for_are_refused() {
    let refused = |change: fn(&mut Config)| {
        let mut config = Config::from_json(CONFIG_35B_A3B).unwrap();
        change(&mut config);
        plan(&config, 64, KvType::Bf16).unwrap_err().to_string()
    };
    let e = refused(|c| c.attention.head_dim = 80);
    assert!(e.contains("head_dim is 80, expected a multiple of 32, at most 256; use --device cpu"), "{e}");
    let e = refused(|c| c.attention.kv_heads = 3);
    assert!(e.contains("query heads per K/V head is 5, expected at most 4, or 8 or 16"), "{e}");
    let e = refused(|c| c.vocab_size = 600_000);
    assert!(e.contains("vocab_size is 600000, expected a multiple of 4, at most 524288"), "{e}");
    let e = refused(|c| {
        if let Some(q) = &mut c.quantization {
            q.overrides.insert("language_model.lm_head".to_owned(), None);
        }
    });
    assert!(e.contains("lm_head is not quantised, expected 4 bits in groups of 64; use --device cpu"), "{e}");
    let e = refused(|c| {
        if let Some(q) = &mut c.quantization {
            q.overrides.clear();
        }
    });
    assert!(e.contains("is 4 bits in groups of 64, expected 8 bits in groups of 64"), "{e}");
}

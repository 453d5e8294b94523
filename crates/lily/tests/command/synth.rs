use std::collections::BTreeSet;
use std::fs;

use lily_cpu::reference::{Reference, State};
use lily_cpu::tap::Point;
use lily_model::files::ModelFiles;
use lily_model::load::Model;

use crate::{RANDOM, assert_refused, output, path, stderr, stdout};

#[test]
fn the_same_seed_gives_the_same_bytes_and_the_model_runs() {
    let folder = tempfile::tempdir().unwrap();
    let made = |name: &str, seed: &str| {
        let out = folder.path().join(name);
        let done = output(&["synth", "--preset", "demo", "--seed", seed, "--out", path(&out)]);
        assert_eq!(stdout(&done), "");
        let bytes = fs::read(out.join("model.safetensors")).unwrap();
        assert!(stderr(&done).contains("bytes of random weights (demo"), "{done:?}");
        bytes
    };
    let (a, b, c) = (made("a", "7"), made("b", "7"), made("c", "8"));
    assert!(a == b && a != c);
    let model = folder.path().join("a");
    let run = output(&["run", "Hello", "--model", path(&model), "-n", "4", "--no-think"]);
    assert!(!stdout(&run).trim().is_empty());
    assert!(!stderr(&run).contains("demonstration"), "{run:?}");
}

#[test]
fn a_folder_with_something_in_it_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("precious"), "").unwrap();
    let done = output(&["synth", "--preset", "demo", "--out", path(folder.path())]);
    assert_refused(&done, 1, &["is not empty"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Random weights must still make a model that is alive: scores that are finite and differ, experts that are
/// all in use.
#[test]
fn a_random_model_is_alive() {
    let model = Model::load(&ModelFiles::folder(&*RANDOM).unwrap(), |_| ()).unwrap();
    let reference = Reference { config: &model.config, weights: &model.weights };
    let moe = &model.config.moe;
    let (mut state, mut used) = (State::default(), vec![vec![0u32; moe.experts]; model.config.layers.len()]);
    let (mut best, mut deviations) = (BTreeSet::new(), Vec::new());
    const TOKENS: u32 = 200;
    for i in 0..TOKENS {
        let hidden = reference.step(i * 37 % 8000, &mut state, &mut |layer, point, values| {
            if point == Point::Experts {
                values.iter().for_each(|&e| used[layer][e as usize] += 1);
            }
        });
        if i % 4 == 0 {
            let logits = reference.logits(&hidden);
            let mean = logits.iter().sum::<f32>() / logits.len() as f32;
            let square = logits.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / logits.len() as f32;
            deviations.push(square.sqrt());
            best.insert(lily_model::sample::argmax(&logits));
        }
    }
    assert!(deviations.iter().all(|d| (1.0..6.0).contains(d)), "{deviations:?}");
    assert!(best.len() > 25, "{} different best tokens in 50", best.len());
    let fair = TOKENS * moe.experts_per_token as u32 / moe.experts as u32;
    for (layer, used) in used.iter().enumerate() {
        assert!(used.iter().all(|&n| n > 0 && n < 3 * fair), "layer {layer}: {used:?}, fair is {fair}");
    }
}

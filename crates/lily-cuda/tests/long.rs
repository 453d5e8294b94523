//! Positions far out, up to the last of 262,144, behind a cache that was never computed: one attention layer of the real shape,
//! with keys and values at random, against the f32 reference with the same.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::random::{Numbers, Stored, model, real_attention, scale_rows};
use common::{Model, assert_close, device, distance, feed, options, tokens};
use lily_cpu::reference::{LayerState, Reference, State};
use lily_cpu::tap::no_tap;
use lily_cuda::{CudaBackend, Options};
use lily_model::backend::Backend;
use lily_model::config::LayerKind::Attention;
use lily_model::weights::Mixer;

/// Relative distance of the logits: keys and values are given as bf16 holds them, so none is rounded.
const TOLERANCE: f64 = 5e-3;
const CONTEXT: usize = 262_144;
const PAGE: usize = 64;
/// Of the snapshot format of `src/export.rs`: magic, checksum, fingerprint, length, parity, whether a token was sampled, which.
const HEADER: usize = 32;

/// One layer with the real model's heads, from which most of the logits comes. Its scores are so far apart that a few positions
/// have most of the weight: an average over all would hide one that is wrong.
fn attention() -> Model {
    let mut model = model(real_attention(&[Attention]), 21, Stored::Quantised);
    let Mixer::Attention(w) = &mut model.weights.layers[0].mixer else { unreachable!("it is attention") };
    w.q_norm.iter_mut().for_each(|gain| *gain = 3.0);
    let rows = w.o_proj.rows;
    scale_rows(&mut w.o_proj, 0..rows, 16.0);
    model
}

/// `[tokens, kv_heads, head_dim]`, as bf16 holds them.
fn values(n: usize, width: usize, spread: f32, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    (0..n * width).map(|_| half::bf16::from_f32(spread * numbers.real()).to_f32()).collect()
}

/// A row as the cache has it: its chunks of eight values turned by the position, as `turned` of `kernels/attention.cu` says.
fn turned(position: usize, row: &[f32]) -> impl Iterator<Item = u8> {
    (0..row.len())
        .map(move |d| row[((d / 8) ^ (position % 8)) * 8 + d % 8])
        .flat_map(|x| half::bf16::from_f32(x).to_le_bytes())
}

/// A snapshot with these keys and values: an exported one of a single token, made longer.
fn snapshot(short: &[u8], n: usize, model: &Model, k: &[f32], v: &[f32]) -> Vec<u8> {
    let (d, width) = (model.config.attention.head_dim, model.config.attention.kv_width());
    let mut bytes = vec![0; HEADER + 4 * n];
    bytes[..HEADER].copy_from_slice(&short[..HEADER]);
    bytes[16..20].copy_from_slice(&(n as u32).to_le_bytes());
    for page in 0..n.div_ceil(PAGE) {
        for cache in [k, v] {
            for head in 0..model.config.attention.kv_heads {
                for position in page * PAGE..(page + 1) * PAGE {
                    let row = cache.get(position * width + head * d..position * width + (head + 1) * d);
                    match row {
                        Some(row) => bytes.extend(turned(position, row)),
                        None => bytes.resize(bytes.len() + 2 * d, 0),
                    }
                }
            }
        }
    }
    let crc = crc32fast::hash(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Two tokens in one step, by the kernels for many, and two more one by one.
fn decode(backend: &mut CudaBackend, bytes: &[u8], n: usize, ids: &[u32]) -> Vec<Vec<f32>> {
    let snapshot = backend.import(bytes).unwrap();
    let seq = backend.resume(snapshot, (n + ids.len()) as u32).unwrap();
    let mut out = feed(backend, seq, n, &ids[..2]);
    for (i, id) in ids.iter().enumerate().skip(2) {
        out.extend(feed(backend, seq, n + i, std::slice::from_ref(id)));
    }
    backend.free(seq).unwrap();
    backend.forget(snapshot).unwrap();
    out
}

fn reference(model: &Model, n: usize, ids: &[u32], k: &[f32], v: &[f32]) -> Vec<Vec<f32>> {
    let reference = Reference { config: &model.config, weights: &model.weights };
    let layer = LayerState { k: k.to_vec(), v: v.to_vec(), ..LayerState::default() };
    let mut state = State::new(n as u32, vec![layer]);
    ids.iter().map(|id| reference.logits(&reference.step(*id, &mut state, &mut no_tap))).collect()
}

#[test]
fn far_positions_equal_the_reference() {
    if !device() {
        return;
    }
    let model = attention();
    let width = model.config.attention.kv_width();
    let mut backend =
        model.backend_with(&Options { context: CONTEXT as u32, max_sequences: 11, ..options() });
    let short = backend.create(1).unwrap();
    feed(&mut backend, short, 0, &[1]);
    let frozen = backend.snapshot(short).unwrap();
    let exported = backend.export(frozen).unwrap();
    // Eight sequences of full length in front: then pages lie beyond the first 2^32 bytes of the cache.
    let front: Vec<_> = (0..8).map(|_| backend.create(CONTEXT as u32).unwrap()).collect();
    let ids = tokens(4, model.config.vocab_size);
    for n in [40_000, 70_000, 140_000, CONTEXT - ids.len()] {
        let (k, v) = (values(n, width, 3f32.sqrt(), n as u64), values(n, width, 6.0, n as u64 + 1));
        let expected = reference(&model, n, &ids, &k, &v);
        let bytes = snapshot(&exported, n, &model, &k, &v);
        let got = decode(&mut backend, &bytes, n, &ids);
        assert_close(&format!("positions {n} to {}", n + ids.len() - 1), &got, &expected, TOLERANCE);
    }
    front.into_iter().for_each(|seq| backend.free(seq).unwrap());
}

/// What the test above is worth: the reference with one page in a hundred changed is farther away than it allows.
#[test]
fn one_wrong_page_in_a_hundred_would_be_seen() {
    let (model, n) = (attention(), 12_800);
    let width = model.config.attention.kv_width();
    let (k, v) = (values(n, width, 3f32.sqrt(), 1), values(n, width, 6.0, 2));
    let ids = tokens(2, model.config.vocab_size);
    let mut other = v.clone();
    let pages = other.chunks_exact_mut(PAGE * width).step_by(100);
    pages.for_each(|page| page.iter_mut().for_each(|x| *x = -*x));
    let right = reference(&model, n, &ids, &k, &v);
    let (wrong, _) = distance(&reference(&model, n, &ids, &k, &other), &right);
    println!("relative distance {wrong:.1e}");
    assert!(wrong > 2.0 * TOLERANCE, "{wrong}");
}

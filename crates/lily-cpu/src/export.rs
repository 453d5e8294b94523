//! Snapshots as bytes: a header that ties them to a model and a format, the state, and a checksum.
//!
//! Little-endian: magic, CRC-32 of everything behind it, fingerprint of the model, number of tokens, the
//! tokens, the sampled token plus one (0: none), then per layer either the conv and recurrent state or the
//! K/V pages, f32.

use std::sync::Arc;

use lily_model::config::Config;
use lily_model::weights::{Layer, Weights};

use crate::state::{LayerState, Page, Recurrent, Sequence};

/// Ends in the version of the format: change it whenever the bytes behind it change meaning.
const MAGIC: [u8; 8] = *b"LilyCPU\x01";

/// A number that tells models apart: their shapes and all gains of their norms.
fn fingerprint(config: &Config, weights: &Weights) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(format!("{config:?}").as_bytes());
    let gains = |l: &'_ Layer| [l.input_norm.clone(), l.post_attention_norm.clone()].concat();
    for x in weights.layers.iter().flat_map(gains).chain(weights.norm.clone()) {
        crc.update(&x.to_le_bytes());
    }
    crc.finalize()
}

/// Writes a frozen sequence.
pub fn to_bytes(config: &Config, weights: &Weights, sequence: &Sequence) -> Vec<u8> {
    let mut body = Vec::new();
    let mut word = |w: u32| body.extend_from_slice(&w.to_le_bytes());
    word(fingerprint(config, weights));
    word(sequence.tokens.len() as u32);
    sequence.tokens.iter().for_each(|&t| word(t));
    word(sequence.sampled.map_or(0, |t| t + 1));
    let mut floats = |values: &[f32]| values.iter().for_each(|x| word(x.to_bits()));
    for layer in &sequence.layers {
        match layer {
            LayerState::Gdn(r) => [&r.conv, &r.state].into_iter().for_each(|v| floats(v)),
            LayerState::Attention(pages) => {
                pages.iter().flat_map(|p| [&p.k, &p.v]).for_each(|v| floats(v));
            }
        }
    }
    [&MAGIC[..], &crc32fast::hash(&body).to_le_bytes(), &body].concat()
}

/// Reads what [`to_bytes`] wrote for the same model; says what is wrong otherwise.
pub fn from_bytes(config: &Config, weights: &Weights, bytes: &[u8]) -> Result<Sequence, String> {
    let header = MAGIC.len() + 4;
    if bytes.len() < header || !bytes.starts_with(&MAGIC) {
        return Err("it is not a snapshot of this format version".to_owned());
    }
    let body = &bytes[header..];
    if crc32fast::hash(body).to_le_bytes() != bytes[MAGIC.len()..header] {
        return Err("its checksum is wrong: it is damaged or cut off".to_owned());
    }
    let (words, rest) = body.as_chunks::<4>();
    let mut words = words.iter().map(|w| u32::from_le_bytes(*w));
    let mut word = || words.next().ok_or_else(|| "it ends too early".to_owned());
    if word()? != fingerprint(config, weights) {
        return Err("it belongs to another model".to_owned());
    }
    let len = word()? as usize;
    if len > config.max_context {
        return Err(format!("it has {len} tokens, the model's context is {}", config.max_context));
    }
    let tokens = (0..len).map(|_| word()).collect::<Result<Vec<u32>, String>>()?;
    let sampled = word()?.checked_sub(1);
    let mut sequence = Sequence::new(config, len);
    (sequence.tokens, sequence.sampled) = (tokens, sampled);
    let mut floats = |values: &mut Vec<f32>| -> Result<(), String> {
        values.iter_mut().try_for_each(|x| word().map(|w| *x = f32::from_bits(w)))
    };
    for layer in &mut sequence.layers {
        match layer {
            LayerState::Gdn(state) => {
                let Recurrent { conv, state } = Arc::make_mut(state);
                floats(conv)?;
                floats(state)?;
            }
            LayerState::Attention(pages) => {
                for page in pages {
                    let Page { k, v } = Arc::make_mut(page);
                    floats(k)?;
                    floats(v)?;
                }
            }
        }
    }
    if words.next().is_some() || !rest.is_empty() {
        return Err("it is longer than its state".to_owned());
    }
    Ok(sequence)
}

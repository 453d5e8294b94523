//! Snapshots as bytes: a header that ties them to a model and a format, the state, and a checksum.
//!
//! Little-endian: magic, CRC-32 of everything behind it, fingerprint of the model, number of tokens, the
//! tokens, the sampled token plus one (0: none), then per layer either the conv and recurrent state, f32, or the
//! K/V pages in the cache's type.

use std::sync::Arc;

use lily_model::config::Config;
use lily_model::weights::Weights;

use crate::state::{Kind, LayerState, Ledger, Page, Recurrent, Sequence, Values};

/// Ends in the version of the format: change it whenever the bytes behind it change meaning.
const MAGIC: [u8; 8] = *b"LilyCPU\x02";

fn fingerprint(config: &Config, kind: Kind, weights: &Weights) -> u32 {
    weights.fingerprint(config, &format!(" {kind:?}"))
}

/// Writes a frozen sequence.
pub fn to_bytes(config: &Config, kind: Kind, weights: &Weights, sequence: &Sequence) -> Vec<u8> {
    let mut body = Vec::new();
    let word = |body: &mut Vec<u8>, w: u32| body.extend_from_slice(&w.to_le_bytes());
    word(&mut body, fingerprint(config, kind, weights));
    word(&mut body, sequence.tokens.len() as u32);
    sequence.tokens.iter().for_each(|&t| word(&mut body, t));
    word(&mut body, sequence.sampled.map_or(0, |t| t + 1));
    for layer in &sequence.layers {
        match layer {
            LayerState::Gdn(r) => {
                r.conv.iter().chain(&r.state).for_each(|x| word(&mut body, x.to_bits()));
            }
            LayerState::Attention(pages) => {
                pages.iter().flat_map(|p| [&p.k, &p.v]).for_each(|values| values.write(&mut body));
            }
        }
    }
    [&MAGIC[..], &crc32fast::hash(&body).to_le_bytes(), &body].concat()
}

/// Tokens of what [`to_bytes`] wrote for the same model; says what is wrong otherwise.
pub fn length(config: &Config, kind: Kind, weights: &Weights, bytes: &[u8]) -> Result<usize, String> {
    open(config, kind, weights, bytes).map(|(len, _)| len)
}

/// Checks the header; gives the number of tokens and what comes behind it.
fn open<'a>(
    config: &Config,
    kind: Kind,
    weights: &Weights,
    bytes: &'a [u8],
) -> Result<(usize, Reader<'a>), String> {
    let header = MAGIC.len() + 4;
    if bytes.len() < header || !bytes.starts_with(&MAGIC) {
        return Err("it is not a snapshot of this format version".to_owned());
    }
    let body = &bytes[header..];
    if crc32fast::hash(body).to_le_bytes() != bytes[MAGIC.len()..header] {
        return Err("its checksum is wrong: it is damaged or cut off".to_owned());
    }
    let mut body = Reader(body);
    if body.word()? != fingerprint(config, kind, weights) {
        return Err("it belongs to another model, or to another precision of the cache".to_owned());
    }
    let len = body.word()? as usize;
    if len > config.max_context {
        return Err(format!("it has {len} tokens, the model's context is {}", config.max_context));
    }
    Ok((len, body))
}

/// Reads what [`to_bytes`] wrote for the same model; says what is wrong otherwise.
pub fn from_bytes(
    config: &Config,
    kind: Kind,
    weights: &Weights,
    ledger: &Ledger,
    bytes: &[u8],
) -> Result<Sequence, String> {
    let (len, mut body) = open(config, kind, weights, bytes)?;
    let tokens = (0..len).map(|_| body.word()).collect::<Result<Vec<u32>, String>>()?;
    let sampled = body.word()?.checked_sub(1);
    let mut sequence = Sequence::new(config, kind, ledger, len);
    (sequence.tokens, sequence.sampled) = (tokens, sampled);
    for layer in &mut sequence.layers {
        match layer {
            LayerState::Gdn(state) => {
                let Recurrent { conv, state } = Arc::make_mut(state);
                for x in conv.iter_mut().chain(state) {
                    *x = f32::from_bits(body.word()?);
                }
            }
            LayerState::Attention(pages) => {
                for page in pages {
                    let Page { k, v, .. } = Arc::make_mut(page);
                    k.read(&mut body)?;
                    v.read(&mut body)?;
                }
            }
        }
    }
    if body.0.is_empty() { Ok(sequence) } else { Err("it is longer than its state".to_owned()) }
}

/// Bytes not yet read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (array, rest) = self.0.split_first_chunk().ok_or("it ends too early")?;
        self.0 = rest;
        Ok(*array)
    }

    fn word(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }
}

impl Values {
    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::F32(values) => values.iter().for_each(|x| to.extend_from_slice(&x.to_le_bytes())),
            Self::Bf16(values) => values.iter().for_each(|x| to.extend_from_slice(&x.to_le_bytes())),
        }
    }

    fn read(&mut self, from: &mut Reader<'_>) -> Result<(), String> {
        match self {
            Self::F32(values) => {
                values.iter_mut().try_for_each(|x| from.array().map(|b| *x = f32::from_le_bytes(b)))
            }
            Self::Bf16(values) => {
                values.iter_mut().try_for_each(|x| from.array().map(|b| *x = u16::from_le_bytes(b)))
            }
        }
    }
}

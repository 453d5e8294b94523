//! Snapshots as bytes: a header that ties them to a model and a format, the state, and a checksum.
//!
//! Little-endian: magic, CRC-32 of everything behind it, fingerprint of the model, number of tokens, the sampled token plus one
//! (0: none), the tokens; then the state of the slot and, page by page, the K/V of these tokens, as on the device.

use crate::backend::{Last, Sequence};
use crate::device::Device;
use crate::state::StateMemory;

/// Ends in the version of the format: change it whenever the bytes behind it change meaning.
const MAGIC: [u8; 8] = *b"LilyMTL\x02";
/// Magic, checksum, and three words.
const HEADER: usize = MAGIC.len() + 4 + 3 * 4;

/// What stands before the state.
pub struct Header {
    /// Every token fed.
    pub tokens: Vec<u32>,
    /// The one that was sampled last.
    pub sampled: Option<u32>,
}

/// Reads a snapshot from a device that works on nothing.
pub fn to_bytes(device: &dyn Device, state: &StateMemory, fingerprint: u32, s: &Sequence) -> Vec<u8> {
    let sampled = if let Last::Known(token) = s.last { token + 1 } else { 0 };
    let mut body = Vec::with_capacity(HEADER + 4 * s.len + state.exported(s.len));
    for word in [fingerprint, s.len as u32, sampled].into_iter().chain(s.tokens.iter().copied()) {
        body.extend_from_slice(&word.to_le_bytes());
    }
    for (place, bytes) in state.pieces(&s.lease, s.len) {
        let begin = body.len();
        body.resize(begin + bytes, 0);
        device.read(place, &mut body[begin..]);
    }
    [&MAGIC[..], &crc32fast::hash(&body).to_le_bytes(), &body].concat()
}

/// Checks all of a snapshot; says what is wrong. `context`: tokens that a sequence may have.
pub fn read_header(
    state: &StateMemory,
    fingerprint: u32,
    context: u32,
    bytes: &[u8],
) -> Result<Header, String> {
    if bytes.len() < HEADER || !bytes.starts_with(&MAGIC) {
        return Err("it is not a snapshot of this format version".to_owned());
    }
    if crc32fast::hash(&bytes[12..]).to_le_bytes() != bytes[8..12] {
        return Err("its checksum is wrong: it is damaged or cut off".to_owned());
    }
    let words = bytes[12..].as_chunks::<4>().0;
    let word = |i: usize| u32::from_le_bytes(words[i]);
    if word(0) != fingerprint {
        return Err("it belongs to another model, or to another precision of the cache".to_owned());
    }
    let len = word(1);
    if len > context {
        return Err(format!("it has {len} tokens, the context is {context}"));
    }
    let len = len as usize;
    let expected = HEADER + 4 * len + state.exported(len);
    if bytes.len() != expected {
        return Err(format!("it has {} bytes, expected {expected}", bytes.len()));
    }
    state.check_slot(&bytes[HEADER + 4 * len..])?;
    let tokens = words[3..3 + len].iter().map(|w| u32::from_le_bytes(*w)).collect();
    Ok(Header { tokens, sampled: word(2).checked_sub(1) })
}

/// Writes the state of a checked snapshot to a device that works on nothing.
pub fn restore(device: &mut dyn Device, state: &StateMemory, s: &Sequence, bytes: &[u8]) {
    let mut rest = &bytes[HEADER + 4 * s.len..];
    for (place, n) in state.pieces(&s.lease, s.len) {
        let (now, later) = rest.split_at(n);
        rest = later;
        device.write(place, now);
    }
}

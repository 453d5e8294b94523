//! Snapshots as bytes: a header that ties them to a model and a format, the state, and a checksum.
//!
//! Little-endian: magic, CRC-32 of everything behind it, fingerprint of the model, number of tokens, which conv state is the
//! present one, whether a token was sampled and which; then tokens, recurrent state, conv states and pages as on the device.

use lily_model::pool::PAGE;

use crate::driver::{Buffer, DriverError};
use crate::state::{Sequence, Sizes, State};

/// Ends in the version of the format: change it whenever the bytes behind it change meaning.
const MAGIC: [u8; 8] = *b"LilyGPU\x02";
const HEADER: usize = MAGIC.len() + 4 + 5 * 4;

/// What stands before the state.
pub struct Header {
    /// Tokens.
    pub len: usize,
    parity: u32,
    sampled: bool,
    token: u32,
}

/// Bytes of each part of a sequence of `len` tokens.
fn parts(sizes: &Sizes, len: usize) -> [usize; 4] {
    [4 * len, sizes.recurrent, sizes.conv, len.div_ceil(PAGE) * sizes.page]
}

/// Reads a snapshot from the device.
pub fn to_bytes(state: &State, fingerprint: u32, s: &Sequence) -> Result<Vec<u8>, DriverError> {
    let [history, recurrent, conv, pages] = parts(&state.sizes, s.len);
    let mut out = vec![0; HEADER + history + recurrent + conv + pages];
    let slot = s.lease.slot as usize;
    let mut token = [0; 4];
    state.sampled.read(4 * slot, &mut token)?;
    let words = [fingerprint, s.len as u32, s.parity, u32::from(s.sampled)];
    for (i, bytes) in words.map(u32::to_le_bytes).into_iter().chain([token]).enumerate() {
        out[12 + 4 * i..16 + 4 * i].copy_from_slice(&bytes);
    }
    let (a, rest) = out[HEADER..].split_at_mut(history);
    let (b, rest) = rest.split_at_mut(recurrent);
    let (c, rest) = rest.split_at_mut(conv);
    state.history.read(slot * state.sizes.history, a)?;
    state.recurrent.read(slot * state.sizes.recurrent, b)?;
    state.conv.read(slot * state.sizes.conv, c)?;
    for (page, bytes) in s.lease.pages.iter().zip(rest.chunks_exact_mut(state.sizes.page)) {
        state.pages.read(*page as usize * state.sizes.page, bytes)?;
    }
    let crc = crc32fast::hash(&out[12..]);
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&crc.to_le_bytes());
    Ok(out)
}

/// Checks all of a snapshot before anything is allocated; says what is wrong.
pub fn read_header(sizes: &Sizes, fingerprint: u32, bytes: &[u8]) -> Result<Header, String> {
    if bytes.len() < HEADER || !bytes.starts_with(&MAGIC) {
        return Err("it is not a snapshot of this format version".to_owned());
    }
    if crc32fast::hash(&bytes[12..]).to_le_bytes() != bytes[8..12] {
        return Err("its checksum is wrong: it is damaged or cut off".to_owned());
    }
    let word = |i: usize| {
        let at = 12 + 4 * i;
        u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    if word(0) != fingerprint {
        return Err("it belongs to another model".to_owned());
    }
    let len = word(1) as usize;
    if 4 * len > sizes.history {
        return Err(format!("it has {len} tokens, the context is {}", sizes.history / 4));
    }
    let expected = HEADER + parts(sizes, len).iter().sum::<usize>();
    if bytes.len() != expected {
        return Err(format!("it has {} bytes, expected {expected}", bytes.len()));
    }
    Ok(Header { len, parity: word(2) & 1, sampled: word(3) != 0, token: word(4) })
}

/// Writes a checked snapshot to the device.
pub fn restore(state: &mut State, header: &Header, bytes: &[u8]) -> Result<Sequence, DriverError> {
    let mut s = state.create(header.len)?;
    (s.len, s.parity, s.sampled) = (header.len, header.parity, header.sampled);
    let [history, recurrent, conv, _] = parts(&state.sizes, header.len);
    let slot = s.lease.slot as usize;
    let mut rest = &bytes[HEADER..];
    let mut write = |buffer: &Buffer, at: usize, n: usize| {
        let (now, later) = rest.split_at(n);
        rest = later;
        buffer.write(at, now)
    };
    write(&state.history, slot * state.sizes.history, history)?;
    write(&state.recurrent, slot * state.sizes.recurrent, recurrent)?;
    write(&state.conv, slot * state.sizes.conv, conv)?;
    for page in &s.lease.pages {
        write(&state.pages, *page as usize * state.sizes.page, state.sizes.page)?;
    }
    state.sampled.write(4 * slot, &header.token.to_le_bytes())?;
    Ok(s)
}

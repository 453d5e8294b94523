//! Tokens as bytes, and the alphabet in which byte-level vocabularies spell bytes.

use super::{ControlToken, TokenizerError};

/// The character that stands for each byte: itself where it is printable Latin-1, else U+0100 and up, in order.
pub(super) const CHAR_OF_BYTE: [char; 256] = {
    let mut table = ['\0'; 256];
    let mut substitutes = 0;
    let mut byte = 0;
    while byte < 256 {
        let code = if matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) {
            byte as u32
        } else {
            substitutes += 1;
            0xFF + substitutes
        };
        table[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => unreachable!(),
        };
        byte += 1;
    }
    table
};

/// The bytes of every token, end to end.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Token `id` is `bytes[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
}

impl TokenBytes {
    /// `vocab` and `controls` share no id.
    pub(super) fn new(vocab: &[(String, u32)], controls: &[ControlToken]) -> Result<Self, TokenizerError> {
        let mut tokens: Vec<(u32, &str, bool)> =
            vocab.iter().map(|(text, id)| (*id, text.as_str(), false)).collect();
        tokens.extend(controls.iter().map(|token| (token.id, token.content.as_str(), true)));
        tokens.sort_unstable();

        let mut table = Self { bytes: Vec::new(), ends: Vec::new() };
        let mut single = [false; 256];
        for (id, text, is_control) in tokens {
            // Ids that the file skips stand for nothing.
            table.ends.resize(id as usize, table.bytes.len() as u32);
            if is_control {
                table.bytes.extend_from_slice(text.as_bytes());
            } else {
                let start = table.bytes.len();
                for c in text.chars() {
                    let byte = byte_of(c).ok_or_else(|| {
                        TokenizerError::Invalid(format!(
                            "model.vocab: token {id} is {text:?}, but {c:?} is not in the byte-level alphabet: \
                             only byte-level BPE is supported"
                        ))
                    })?;
                    table.bytes.push(byte);
                }
                if let [byte] = table.bytes[start..] {
                    single[usize::from(byte)] = true;
                }
            }
            table.ends.push(table.bytes.len() as u32);
        }
        match single.iter().position(|found| !found) {
            None => Ok(table),
            Some(byte) => Err(TokenizerError::Invalid(format!(
                "model.vocab: a byte-level vocabulary has a token for each of the 256 bytes, but {byte:#04x} \
                 (spelled {:?}) is missing",
                CHAR_OF_BYTE[byte]
            ))),
        }
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

fn byte_of(c: char) -> Option<u8> {
    match c {
        // Latin-1 stands for itself or for nothing.
        '\0'..='\u{FF}' => (CHAR_OF_BYTE[c as usize] == c).then_some(c as u8),
        // The substitutes, in the order of the bytes they stand for: 00..=20, 7F..=A0, AD.
        '\u{100}'..='\u{120}' => Some((c as u32 - 0x100) as u8),
        '\u{121}'..='\u{142}' => Some((c as u32 - 0x121 + 0x7F) as u8),
        '\u{143}' => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_read_as_it_is_written() {
        for byte in 0..=255 {
            assert_eq!(byte_of(CHAR_OF_BYTE[usize::from(byte)]), Some(byte));
        }
        assert_eq!(CHAR_OF_BYTE[usize::from(b' ')], 'Ġ');
        assert_eq!(('\0'..=char::MAX).filter(|&c| byte_of(c).is_some()).count(), 256);
    }
}

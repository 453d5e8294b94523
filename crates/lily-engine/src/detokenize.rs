//! Bytes of tokens become text.

/// Joins the bytes of tokens and gives them out as soon as they are whole characters.
///
/// A token may end inside a character: the beginning of one is kept until the rest of it comes. Bytes that can't
/// be part of any character become U+FFFD, one for each sequence that Unicode calls a maximal subpart, as
/// [`String::from_utf8_lossy`] has it.
#[derive(Debug, Default)]
pub struct Detokenizer {
    /// The beginning of a character: at most three bytes.
    incomplete: Vec<u8>,
}

impl Detokenizer {
    /// The text that becomes certain with these bytes.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.incomplete.extend_from_slice(bytes);
        let mut text = String::new();
        let mut used = 0;
        for chunk in self.incomplete.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = used + invalid.len() == self.incomplete.len();
            if at_end && str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none()) {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            used += invalid.len();
        }
        self.incomplete.drain(..used);
        text
    }

    /// The end: the beginning of a character that never came is one U+FFFD.
    pub fn finish(&mut self) -> &'static str {
        let incomplete = !self.incomplete.is_empty();
        self.incomplete.clear();
        if incomplete { "\u{FFFD}" } else { "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(bytes: &[u8], length: usize) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        let mut pieces: Vec<String> = bytes.chunks(length).map(|chunk| detokenizer.push(chunk)).collect();
        pieces.push(detokenizer.finish().to_owned());
        pieces
    }

    #[test]
    fn never_emits_half_a_character() {
        let text = "👩‍👩‍👧 ďábelské 漢字\0";
        for length in 1..6 {
            let pieces = pieces(text.as_bytes(), length);
            assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
            assert_eq!(pieces.concat(), text);
        }
    }

    #[test]
    fn a_character_comes_with_its_last_byte() {
        let mut detokenizer = Detokenizer::default();
        let got: Vec<String> = "é漢".as_bytes().chunks(1).map(|byte| detokenizer.push(byte)).collect();
        assert_eq!(got, ["", "é", "", "", "漢"]);
    }

    #[test]
    fn an_end_inside_a_character_is_one_replacement() {
        let bytes = "a👩".as_bytes();
        for end in 2..bytes.len() {
            assert_eq!(pieces(&bytes[..end], 1).concat(), "a\u{FFFD}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_equal_the_lossy_whole(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80u8..0xC0, 0xE0u8..0xF5], 0..40),
            length in 1usize..6,
        ) {
            prop_assert_eq!(pieces(&bytes, length).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}

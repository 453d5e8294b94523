//! Cuts a text into the words that merges stay inside of.

use regex::Regex;

/// The rule of the Qwen3.5 family, as `tokenizer.json` spells it.
pub(super) const RULE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// [`RULE`] in linear time, whatever the text.
///
/// The rule looks ahead, so only a backtracking engine can run it as it is written, and such an engine gives up
/// within a long run of white space (`tokenizers` then leaves the rest of the text unsplit). Here `\s+(?!\S)|\s+`
/// is plain `\s+`, and [`Splitter::pieces`] gives back the last character where the lookahead would have.
pub(super) struct Splitter {
    regex: Regex,
}

impl Splitter {
    pub(super) fn new() -> Result<Self, regex::Error> {
        let without_lookahead = RULE.replace(r"|\s+(?!\S)|\s+", r"|\s+");
        Ok(Self { regex: Regex::new(&format!(r"\A(?:{without_lookahead})"))? })
    }

    /// The words of a text, in order; together they are the text.
    pub(super) fn pieces<'t>(&self, mut rest: &'t str) -> impl Iterator<Item = &'t str> {
        std::iter::from_fn(move || {
            // Every character starts a match: letters, marks, digits, white space and all others have a branch.
            let found = self.regex.find(rest)?.as_str();
            let (piece, after) = rest.split_at(found.len() - given_back(found, rest.len()));
            rest = after;
            Some(piece)
        })
    }
}

/// How many bytes at the end of a match the lookahead `\s+(?!\S)` leaves to the next word: the last character
/// of white space that something else follows, unless it is the only one. White space that ends in a newline
/// was matched by an earlier branch, without lookahead.
fn given_back(found: &str, rest_len: usize) -> usize {
    let Some(last) = found.chars().next_back() else { return 0 };
    let lookahead = last.is_whitespace() && !matches!(last, '\r' | '\n') && found.len() < rest_len;
    if lookahead && found.len() > last.len_utf8() { last.len_utf8() } else { 0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior,
    };

    use super::*;

    /// What `tokenizers` makes of the rule as it is written.
    fn reference(text: &str) -> Vec<String> {
        let split =
            Split::new(SplitPattern::Regex(RULE.into()), SplitDelimiterBehavior::Isolated, false).unwrap();
        let mut pretokenized = PreTokenizedString::from(text);
        split.pre_tokenize(&mut pretokenized).unwrap();
        let splits = pretokenized.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(piece, _, _)| piece.to_string()).collect()
    }

    fn pieces(text: &str) -> Vec<String> {
        Splitter::new().unwrap().pieces(text).map(str::to_string).collect()
    }

    #[test]
    fn white_space_before_a_word_leaves_one_character_to_it() {
        assert_eq!(pieces("a   b"), ["a", "  ", " b"]);
        assert_eq!(pieces("a b"), ["a", " b"]);
        assert_eq!(pieces("a   "), ["a", "   "]);
        assert_eq!(pieces("a  \n  b"), ["a", "  \n", " ", " b"]);
        assert_eq!(pieces("a\u{3000}\u{3000}1"), ["a", "\u{3000}", "\u{3000}", "1"]);
    }

    #[test]
    fn every_character_alone_and_in_company_is_split_as_written() {
        let splitter = Splitter::new().unwrap();
        for block in ('\0'..=char::MAX).collect::<Vec<_>>().chunks(4096) {
            let text: String = block.iter().flat_map(|&c| [c, ' ', c, '\'', c, c, '1', ' ', ' ']).collect();
            let ours: Vec<&str> = splitter.pieces(&text).collect();
            assert_eq!(ours, reference(&text), "from {:?}", block[0]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn any_text_is_split_as_written(
            text in r"([ \t\r\n\u{a0}\u{3000}\u{2028}]{1,4}|[a-zA-Zſé漢'\u{301}]{1,5}|[0-9½²]{1,3}|[!-/]{1,3}|\PC|.){0,24}"
        ) {
            prop_assert_eq!(pieces(&text), reference(&text));
        }
    }
}

//! Stop strings.

/// Looks for stop strings in a text that comes in pieces.
///
/// The string that is complete first wins; of several that end at the same character, the longest. The text
/// is cut where it begins. What could still be the beginning of a stop string is held back.
#[derive(Debug)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// Text that may be the beginning of a stop string: as long as the longest partial match.
    held: String,
    /// The stop string that was met.
    met: Option<String>,
}

/// A stop string and how much of it the text ends with (Knuth, Morris and Pratt: linear in the text).
#[derive(Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `fallback[n]`: length of the longest proper suffix of the first `n + 1` bytes that is also a prefix.
    fallback: Vec<usize>,
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = Vec::with_capacity(bytes.len());
        let mut matched = 0;
        for (i, &byte) in bytes.iter().enumerate() {
            if i > 0 {
                matched = extend(&bytes, &fallback, matched, byte);
            }
            fallback.push(matched);
        }
        Self { bytes, fallback, matched: 0 }
    }

    /// Takes a byte of text; whether the text now ends with the whole pattern.
    fn step(&mut self, byte: u8) -> bool {
        self.matched = extend(&self.bytes, &self.fallback, self.matched, byte);
        self.matched == self.bytes.len()
    }
}

/// Length of the prefix that the text matches after one more byte. `matched` is less than the whole pattern.
fn extend(pattern: &[u8], fallback: &[usize], mut matched: usize, byte: u8) -> usize {
    while matched > 0 && pattern[matched] != byte {
        matched = fallback[matched - 1];
    }
    matched + usize::from(pattern[matched] == byte)
}

impl StopMatcher {
    /// A matcher for these strings, none of them empty.
    pub fn new(stop: &[String]) -> Self {
        let patterns = stop.iter().filter(|text| !text.is_empty()).map(|text| Pattern::new(text)).collect();
        Self { patterns, held: String::new(), met: None }
    }

    /// Takes a piece of text. Gives what is certain to be wanted, and whether a stop string was met; what followed
    /// it in the piece is dropped.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        let before = self.held.len();
        self.held.push_str(piece);
        for (i, &byte) in piece.as_bytes().iter().enumerate() {
            let complete = self.patterns.iter_mut().filter_map(|p| p.step(byte).then_some(p.bytes.len()));
            if let Some(longest) = complete.max() {
                let end = before + i + 1;
                self.met = self.held.get(end - longest..end).map(str::to_owned);
                self.held.truncate(end - longest);
                return (self.flush(), true);
            }
        }
        let partial = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - partial);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The stop string that was met.
    pub fn met(&self) -> Option<&str> {
        self.met.as_deref()
    }

    /// Gives out what is held back: the text ends here, or other output interrupts it.
    pub fn flush(&mut self) -> String {
        self.patterns.iter_mut().for_each(|pattern| pattern.matched = 0);
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn strings(stop: &[&str]) -> Vec<String> {
        stop.iter().map(|text| text.to_string()).collect()
    }

    /// What a matcher gives for a text in pieces of so many characters.
    fn run(stop: &[String], text: &str, length: usize) -> (String, bool) {
        let mut matcher = StopMatcher::new(stop);
        let chars: Vec<char> = text.chars().collect();
        let mut out = String::new();
        for piece in chars.chunks(length) {
            let (text, stopped) = matcher.push(&piece.iter().collect::<String>());
            out += &text;
            if stopped {
                return (out, true);
            }
        }
        (out + &matcher.flush(), false)
    }

    /// The rule, word for word.
    fn naive(stop: &[String], text: &str) -> (String, bool) {
        for (i, c) in text.char_indices() {
            let so_far = &text[..i + c.len_utf8()];
            if let Some(met) = stop.iter().filter(|s| so_far.ends_with(*s)).max_by_key(|s| s.len()) {
                return (so_far[..so_far.len() - met.len()].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    #[test]
    fn a_stop_string_over_two_pieces_is_cut_exactly() {
        let mut matcher = StopMatcher::new(&strings(&["beta gamma"]));
        assert_eq!(matcher.push("alpha be"), ("alpha ".to_owned(), false));
        assert_eq!(matcher.push("ta gam"), (String::new(), false));
        assert_eq!(matcher.met(), None);
        assert_eq!(matcher.push("ma delta"), (String::new(), true));
        assert_eq!(matcher.met(), Some("beta gamma"));
    }

    #[test]
    fn what_turns_out_not_to_match_is_released() {
        let mut matcher = StopMatcher::new(&strings(&["aab"]));
        assert_eq!(matcher.push("aa"), (String::new(), false));
        assert_eq!(matcher.push("a"), ("a".to_owned(), false));
        assert_eq!(matcher.push("c"), ("aac".to_owned(), false));
        assert_eq!(matcher.push("a"), (String::new(), false));
        assert_eq!(matcher.flush(), "a");
        assert_eq!(matcher.push("ab"), ("ab".to_owned(), false), "a flush interrupts a match");
    }

    #[test]
    fn without_stop_strings_text_passes() {
        assert_eq!(StopMatcher::new(&[]).push("text"), ("text".to_owned(), false));
    }

    proptest! {
        #[test]
        fn any_pieces_equal_the_naive_search(
            text in "[abé漢]{0,40}", stop in prop::collection::vec("[abé漢]{1,5}", 0..4), length in 1usize..7,
        ) {
            prop_assert_eq!(run(&stop, &text, length), naive(&stop, &text));
        }
    }
}

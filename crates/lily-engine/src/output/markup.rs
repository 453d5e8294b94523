//! Finding tags in text that comes in pieces.

/// What a text holds of some tags.
#[derive(Debug, PartialEq)]
pub(super) enum Scan {
    /// The first tag.
    Tag {
        /// Where it begins.
        at: usize,
        /// Which it is.
        tag: usize,
    },
    /// None, but the text from here on may be the beginning of one.
    Partial {
        /// Where that begins.
        at: usize,
    },
    /// None.
    Nothing,
}

/// Looks for the first of `tags`, each of which begins with `<`.
pub(super) fn scan(text: &str, tags: &[&str]) -> Scan {
    for (at, _) in text.match_indices('<') {
        match at_start(&text[at..], tags) {
            Scan::Tag { tag, .. } => return Scan::Tag { at, tag },
            Scan::Partial { .. } => return Scan::Partial { at },
            Scan::Nothing => {}
        }
    }
    Scan::Nothing
}

/// Whether a text begins with one of `tags`, or is the beginning of one.
pub(super) fn at_start(text: &str, tags: &[&str]) -> Scan {
    if let Some(tag) = tags.iter().position(|tag| text.starts_with(tag)) {
        return Scan::Tag { at: 0, tag };
    }
    if tags.iter().any(|tag| tag.starts_with(text)) { Scan::Partial { at: 0 } } else { Scan::Nothing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_tag_is_found_or_its_beginning() {
        let tags = ["<ab>", "</ab>"];
        assert_eq!(scan("x<y</ab><ab>", &tags), Scan::Tag { at: 3, tag: 1 });
        assert_eq!(scan("<<ab", &tags), Scan::Partial { at: 1 });
        assert_eq!(scan("<ac", &tags), Scan::Nothing);
        assert_eq!(scan("é<", &tags), Scan::Partial { at: 2 });
        assert_eq!(scan("<ab>", &[]), Scan::Nothing);
    }
}

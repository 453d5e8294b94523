//! Writing pieces of Lark grammars.

/// A literal that stands for exactly this text.
pub(super) fn literal(text: &str) -> String {
    // Lark's literals are JSON strings, but for this one character.
    serde_json::Value::from(text).to_string().replace('\u{7F}', "\\u007f")
}

/// A regular expression as a terminal.
pub(super) fn regex(pattern: &str) -> String {
    llguidance::regex_to_lark(pattern, "")
}

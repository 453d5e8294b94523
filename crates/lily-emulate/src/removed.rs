//! Kernels without one of the statements that order their threads: a test must notice.

use std::ops::Range;

/// A call in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call<'t> {
    /// Bytes of the text, up to the closing parenthesis.
    pub at: Range<usize>,
    /// Counted from 1.
    pub line_number: usize,
    /// The line that it begins in, without what it is indented by.
    pub line: &'t str,
}

/// All calls of these functions (`name`, or `name<argument>`) in C++, in their order. Not in comments, nor where an inline function is
/// defined.
pub fn calls<'t>(text: &'t str, functions: &[&str]) -> Vec<Call<'t>> {
    let (mut calls, mut begin) = (Vec::new(), 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let mut found: Vec<usize> = functions.iter().flat_map(|f| places(code, f)).collect();
        found.sort_unstable();
        let call = |at| Call {
            at: begin + at..begin + at + length(&text[begin + at..]),
            line_number: number + 1,
            line: line.trim(),
        };
        calls.extend(found.into_iter().map(call));
        begin += line.len();
    }
    calls
}

/// The text with a statement that does nothing in the place of the call.
pub fn without(text: &str, call: &Call<'_>) -> String {
    format!("{}(void)0{}", &text[..call.at.start], &text[call.at.end..])
}

/// Where a line calls a function.
fn places(code: &str, function: &str) -> impl Iterator<Item = usize> {
    let call = format!("{function}(");
    let called = |at: &usize| {
        let before = &code[..*at];
        !before.ends_with(|c: char| c.is_alphanumeric() || c == '_') && !before.contains("inline")
    };
    code.match_indices(&call).map(|(at, _)| at).filter(called).collect::<Vec<_>>().into_iter()
}

/// Bytes up to the parenthesis that closes the first one.
fn length(text: &str) -> usize {
    let mut depth = 0;
    let closes = |c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ')' && depth == 0
    };
    text.find(closes).map_or(text.len(), |end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
inline void wait(int n) { sync(n); }
void kernel() {
    wait(f(1), 2);  // wait(3)
    if (x) { sync<4>(); wait(
        g()); }
    await(5);
    sync(6);
}
";

    #[test]
    fn each_call_is_found_and_removed() {
        let calls = calls(TEXT, &["wait", "sync<4>"]);
        let found: Vec<_> = calls.iter().map(|c| (c.line_number, &TEXT[c.at.clone()])).collect();
        assert_eq!(found, [(3, "wait(f(1), 2)"), (4, "sync<4>()"), (4, "wait(\n        g())")]);
        assert_eq!(calls[0].line, "wait(f(1), 2);  // wait(3)");
        let texts: Vec<String> = calls.iter().map(|call| without(TEXT, call)).collect();
        assert!(texts[0].contains("    (void)0;  // wait(3)\n"));
        assert!(texts[1].contains("{ (void)0; wait(\n        g()); }"));
        assert!(texts[2].contains("{ sync<4>(); (void)0; }"));
    }
}

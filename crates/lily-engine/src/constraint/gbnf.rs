//! Grammars in llama.cpp's form (GBNF), rewritten in Lark.
//!
//! A rule is `name ::= alternatives`. Alternatives are divided by `|` and made of strings, character classes in the
//! syntax of regular expressions, `.`, names and groups, each of which `*`, `+`, `?`, `{n}`, `{n,}` or `{n,m}` may
//! repeat. A comment goes from `#` to the end of its line. Source: the grammars' README in llama.cpp.

use std::fmt::Write;

use super::lark::literal;

/// How deep groups may be nested.
const MAX_DEPTH: usize = 64;

/// The rule that a text of the grammar must match.
const ROOT: &str = "root";

/// Rewrites a grammar; fails with the line and what is wrong there.
pub(super) fn to_lark(source: &str) -> Result<String, String> {
    let mut reader = Reader { rest: source, line: 1 };
    let mut lark = String::new();
    let mut has_root = false;
    loop {
        reader.skip(true);
        if reader.rest.is_empty() {
            break;
        }
        let name = reader.name()?;
        reader.skip(false);
        if !reader.take("::=") {
            return Err(reader.problem(&format!("expected `::=` behind {name}")));
        }
        has_root |= name == ROOT;
        let alternatives = reader.alternatives(0)?;
        let _ = writeln!(lark, "{}: {alternatives}", rule(name));
    }
    if has_root { Ok(lark) } else { Err(format!("there is no rule `{ROOT}`")) }
}

/// The name of a rule in Lark, where a capital would make it a terminal.
fn rule(name: &str) -> String {
    if name == ROOT { "start".to_owned() } else { format!("r_{}", name.to_lowercase()) }
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Reader<'a> {
    fn problem(&self, what: &str) -> String {
        let found: String = self.rest.chars().take(20).collect();
        format!("line {}: {what}, found {found:?}", self.line)
    }

    fn advance(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.rest.starts_with(text);
        if found {
            self.advance(text.len());
        }
        found
    }

    /// Passes over spaces and comments, and over ends of lines if they mean nothing here.
    fn skip(&mut self, lines: bool) {
        loop {
            let blank: &[char] = if lines { &[' ', '\t', '\r', '\n'] } else { &[' ', '\t'] };
            self.advance(self.rest.len() - self.rest.trim_start_matches(blank).len());
            if !self.rest.starts_with('#') {
                return;
            }
            self.advance(self.rest.find('\n').unwrap_or(self.rest.len()));
        }
    }

    fn name(&mut self) -> Result<&'a str, String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        match self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len()) {
            0 => Err(self.problem("expected the name of a rule")),
            length => Ok(self.advance(length)),
        }
    }

    /// Up to the end of the rule, or of the group: that is in so many others and in a rule.
    fn alternatives(&mut self, depth: usize) -> Result<String, String> {
        let in_group = depth > 0;
        if depth > MAX_DEPTH {
            return Err(self.problem("groups are nested too deep"));
        }
        let mut lark = String::new();
        loop {
            // A rule may go on in the next line behind a `|`.
            self.skip(in_group || lark.ends_with("| ") || lark.is_empty());
            match self.rest.chars().next() {
                None | Some('\r' | '\n') if !in_group => return Ok(or_empty(lark)),
                Some(')') if in_group => return Ok(or_empty(lark)),
                None => return Err(self.problem("expected `)`")),
                Some('|') => {
                    self.advance(1);
                    let nothing = lark.is_empty() || lark.ends_with("| ");
                    lark.push_str(if nothing { "\"\" | " } else { "| " });
                }
                Some(_) => {
                    let item = self.item(depth)?;
                    let repeated = self.repetition()?;
                    let _ = write!(lark, "{item}{repeated} ");
                }
            }
        }
    }

    fn item(&mut self, depth: usize) -> Result<String, String> {
        match self.rest.chars().next() {
            Some('"') => self.string(),
            Some('[') => self.class(),
            Some('.') => {
                self.advance(1);
                Ok("/(?s:.)/".to_owned())
            }
            Some('(') => {
                self.advance(1);
                let inner = self.alternatives(depth + 1)?;
                self.advance(1);
                Ok(format!("({inner})"))
            }
            _ => self.name().map(rule),
        }
    }

    fn repetition(&mut self) -> Result<String, String> {
        match self.rest.chars().next() {
            Some('*' | '+' | '?') => Ok(self.advance(1).to_owned()),
            Some('{') => {
                let end = self.rest.find('}').ok_or_else(|| self.problem("expected `}`"))?;
                let range = self.advance(end + 1);
                let is_range = |c: char| c.is_ascii_digit() || "{},".contains(c);
                match range.chars().all(is_range) {
                    true => Ok(range.to_owned()),
                    false => {
                        Err(format!("line {}: expected {{n}}, {{n,}} or {{n,m}}, found {range}", self.line))
                    }
                }
            }
            _ => Ok(String::new()),
        }
    }

    fn string(&mut self) -> Result<String, String> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.advance(at + 1);
                    return Ok(literal(&text));
                }
                '\n' => break,
                '\\' => text.push(escaped(&mut chars).ok_or_else(|| self.problem("an unknown escape"))?),
                c => text.push(c),
            }
        }
        Err(self.problem("a string that does not end"))
    }

    /// A class means in a regular expression what it means here, but for its escapes.
    fn class(&mut self) -> Result<String, String> {
        let mut class = String::from("[");
        let mut chars = self.rest.char_indices().skip(1).peekable();
        if chars.next_if(|(_, c)| *c == '^').is_some() {
            class.push('^');
        }
        while let Some((at, c)) = chars.next() {
            match c {
                ']' => {
                    self.advance(at + 1);
                    return Ok(format!("/{class}]/"));
                }
                '-' => class.push('-'),
                '\\' => {
                    let c = escaped(&mut chars).ok_or_else(|| self.problem("an unknown escape"))?;
                    let _ = write!(class, "\\x{{{:x}}}", u32::from(c));
                }
                c => {
                    let _ = write!(class, "\\x{{{:x}}}", u32::from(c));
                }
            }
        }
        Err(self.problem("a class that does not end"))
    }
}

fn or_empty(lark: String) -> String {
    if lark.is_empty() || lark.ends_with("| ") { lark + "\"\"" } else { lark }
}

/// The character behind a backslash.
fn escaped(chars: &mut impl Iterator<Item = (usize, char)>) -> Option<char> {
    let (_, c) = chars.next()?;
    let mut code = |digits| {
        let text: String = chars.by_ref().take(digits).map(|(_, c)| c).collect();
        u32::from_str_radix(&text, 16).ok().and_then(char::from_u32)
    };
    match c {
        'n' => Some('\n'),
        'r' => Some('\r'),
        't' => Some('\t'),
        'x' => code(2),
        'u' => code(4),
        'U' => code(8),
        '"' | '\\' | '[' | ']' | '-' | '^' => Some(c),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_rewritten() {
        let source = "# numbers\nroot ::= item-list  # one or more\nitem-list ::= Num (\", \" Num){0,3}\n\
                      Num ::= [0-9]+ |\n  \"x\\n\\x41\" | [^a\\]\\-]? .\n";
        let lark = to_lark(source).unwrap();
        let expected = "start: r_item-list \n\
                        r_item-list: r_num (\", \" r_num ){0,3} \n\
                        r_num: /[\\x{30}-\\x{39}]/+ | \"x\\nA\" | /[^\\x{61}\\x{5d}\\x{2d}]/? /(?s:.)/ \n";
        assert_eq!(lark, expected);
        assert_eq!(to_lark("root ::= | \"a\" | ()").unwrap(), "start: \"\" | \"a\" | (\"\") \n");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (source, words) in [
            ("start ::= \"a\"", "no rule `root`"),
            ("root ::= \"a\"\nother = x", "line 2: expected `::=`"),
            ("root ::= \"a", "line 1: a string that does not end"),
            ("root ::= [a", "a class that does not end"),
            ("root ::= \"\\q\"", "an unknown escape"),
            ("root ::= (\"a\"", "expected `)`"),
            ("root ::= \"a\"{x}", "{n,m}, found {x}"),
            ("root ::= %", "expected the name of a rule"),
            (&format!("root ::= {}", "(".repeat(100_000)), "nested too deep"),
        ] {
            let problem = to_lark(source).unwrap_err();
            assert!(problem.contains(words), "{problem:?} should say {words:?}");
        }
    }
}

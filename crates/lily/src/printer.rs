//! Output of the model on a terminal or in a pipe: the answer on standard output, the thought beside it on
//! standard error.

use std::io::{self, IsTerminal, Write};

use lily_engine::output::Delta;

const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// Prints the deltas of one reply as they come.
pub struct Printer<Out, Err> {
    out: Out,
    err: Err,
    /// Thoughts are dimmed; else they are marked.
    dim: bool,
    at: At,
    /// The last character of the answer was a newline.
    at_line_start: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum At {
    Start,
    Thought,
    Text,
    Call,
}

impl Printer<io::Stdout, io::Stderr> {
    /// On this process's streams.
    pub fn new() -> Self {
        let dim = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self::on(io::stdout(), io::stderr(), dim)
    }
}

impl<Out: Write, Err: Write> Printer<Out, Err> {
    fn on(out: Out, err: Err, dim: bool) -> Self {
        Self { out, err, dim, at: At::Start, at_line_start: true }
    }

    /// Prints a piece. Every write leaves the terminal in its normal state.
    pub fn print(&mut self, delta: &Delta) -> io::Result<()> {
        match delta {
            Delta::Reasoning(text) => {
                self.go_to(At::Thought)?;
                match self.dim {
                    true => write!(self.err, "{DIM}{text}{RESET}")?,
                    false => write!(self.err, "{text}")?,
                }
                self.err.flush()
            }
            Delta::Text(text) => {
                self.go_to(At::Text)?;
                self.at_line_start = text.ends_with('\n');
                self.write_out(text)
            }
            Delta::ToolCall { name, .. } => {
                self.end_line()?;
                self.go_to(At::Call)?;
                self.at_line_start = false;
                self.write_out(&format!("call {name} "))
            }
            Delta::ToolArguments { fragment, .. } => self.write_out(fragment),
        }
    }

    /// The reply is over, or was stopped.
    pub fn finish(&mut self) -> io::Result<()> {
        self.go_to(At::Text)?;
        self.end_line()
    }

    fn go_to(&mut self, next: At) -> io::Result<()> {
        let last = std::mem::replace(&mut self.at, next);
        if last == next {
            return Ok(());
        }
        if last == At::Thought {
            let end = if self.dim { "\n\n" } else { "\n</think>\n" };
            self.err.write_all(end.as_bytes())?;
        }
        if last == At::Call {
            self.end_line()?;
        }
        if next == At::Thought && !self.dim {
            self.err.write_all(b"<think>\n")?;
        }
        self.err.flush()
    }

    fn end_line(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.at_line_start, true) { Ok(()) } else { self.write_out("\n") }
    }

    fn write_out(&mut self, text: &str) -> io::Result<()> {
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(dim: bool, deltas: &[Delta]) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut printer = Printer::on(&mut out, &mut err, dim);
        deltas.iter().for_each(|delta| printer.print(delta).unwrap());
        printer.finish().unwrap();
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    fn thought(text: &str) -> Delta {
        Delta::Reasoning(text.to_owned())
    }

    fn text(text: &str) -> Delta {
        Delta::Text(text.to_owned())
    }

    #[test]
    fn the_answer_goes_out_and_the_thought_beside_it() {
        let deltas = [thought("Let me"), thought(" see."), text("It is"), text(" 4.")];
        let (out, err) = printed(false, &deltas);
        assert_eq!((out.as_str(), err.as_str()), ("It is 4.\n", "<think>\nLet me see.\n</think>\n"));
    }

    #[test]
    fn every_piece_leaves_the_terminal_as_it_was() {
        let (out, err) = printed(true, &[thought("a"), thought("b"), text("c\n")]);
        assert_eq!((out.as_str(), err.as_str()), ("c\n", "\x1b[2ma\x1b[0m\x1b[2mb\x1b[0m\n\n"));
    }

    #[test]
    fn calls_have_lines_of_their_own() {
        let call = |index, name: &str| Delta::ToolCall { index, id: String::new(), name: name.to_owned() };
        let arguments = |index, json: &str| Delta::ToolArguments { index, fragment: json.to_owned() };
        let deltas = [
            text("So:"),
            call(0, "f"),
            arguments(0, "{"),
            arguments(0, "}"),
            call(1, "g"),
            arguments(1, "{}"),
        ];
        assert_eq!(printed(false, &deltas).0, "So:\ncall f {}\ncall g {}\n");
    }

    #[test]
    fn nothing_prints_nothing() {
        assert_eq!(printed(false, &[]), (String::new(), String::new()));
    }
}

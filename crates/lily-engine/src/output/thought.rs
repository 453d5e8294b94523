//! The thought, up to `</think>`.

use super::markup::{Scan, at_start, scan};
use super::{Output, Step};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

#[derive(Debug, Default)]
pub(super) struct Thought {
    /// Something other than newlines and an opening tag has come.
    begun: bool,
    /// The prompt has opened the thought; some models open it once more.
    reopened: bool,
    /// Newlines that belong to the thought only if more of it follows.
    newlines: usize,
}

impl Thought {
    pub fn step(&mut self, rest: &str, output: &mut Output) -> Step {
        if !self.begun {
            let newlines = rest.len() - rest.trim_start_matches('\n').len();
            if newlines > 0 {
                return Step::Used(newlines);
            }
            match at_start(rest, &[OPEN]) {
                Scan::Tag { .. } if !self.reopened => {
                    self.reopened = true;
                    return Step::Used(OPEN.len());
                }
                Scan::Partial { .. } if !self.reopened => return Step::More,
                _ => self.begun = true,
            }
        }
        match scan(rest, &[CLOSE]) {
            Scan::Tag { at, .. } => {
                self.write(&rest[..at], output);
                Step::Done(at + CLOSE.len())
            }
            Scan::Partial { at: 0 } => Step::More,
            Scan::Partial { at } => {
                self.write(&rest[..at], output);
                Step::Used(at)
            }
            Scan::Nothing => {
                self.write(rest, output);
                Step::Used(rest.len())
            }
        }
    }

    /// The output ends inside the thought; `held` was not read yet.
    pub fn finish(mut self, held: &str, output: &mut Output) {
        self.write(held, output);
    }

    fn write(&mut self, text: &str, output: &mut Output) {
        let written = text.trim_end_matches('\n');
        if !written.is_empty() {
            output.reasoning(&"\n".repeat(self.newlines));
            output.reasoning(written);
            self.newlines = 0;
        }
        self.newlines += text.len() - written.len();
    }
}

//! What of a reply is not left to the model: an end to its thought, and a grammar.
//!
//! Both act through the mask of the next token, so they need the token before it. A guided reply is therefore
//! never a step ahead of what the host knows of it.

use std::sync::Arc;
use std::time::Instant;

use llguidance::Matcher;

use crate::constraint::masks::{Masked, Masks, Pending, wait};
use crate::constraint::{Constraint, Start};
use crate::reply::Reply;

/// Guides one reply.
pub(crate) struct Guide {
    constraint: Option<Constraint>,
    state: State,
    /// Tokens that the thought may have, its closing tag included, and the mask that allows that tag alone.
    budget: Option<(u32, Arc<[u32]>)>,
    masks: Masks,
}

/// Where the grammar is.
enum State {
    /// Not begun, or there is none.
    Idle,
    /// Its mask is being computed.
    Pending(Pending),
    /// Its mask is there.
    Ready(Masked),
}

/// What the next token may be.
pub(crate) enum Choice {
    /// Anything.
    Any,
    /// What the mask allows.
    Of(Arc<[u32]>),
    /// The mask isn't there yet.
    Unknown,
}

impl Guide {
    /// `budget` is as in the field.
    pub fn new(constraint: Option<Constraint>, budget: Option<(u32, Arc<[u32]>)>, masks: Masks) -> Self {
        Self { constraint, state: State::Idle, budget, masks }
    }

    /// Whether the token before the next one must be known. `reply` is what came so far.
    pub fn acts(&self, reply: &Reply) -> bool {
        self.constraint.is_some() || (self.budget.is_some() && reply.in_thought())
    }

    /// Starts to compute the first mask, if it is the grammar that the reply begins with.
    pub fn begin(&mut self, reply: &Reply) {
        if let Some(constraint) = &self.constraint
            && constraint.start == Start::Answer
            && !reply.in_thought()
        {
            let matcher = Box::new(constraint.matcher());
            self.ask(matcher, Vec::new());
        }
    }

    /// Takes the token that was drawn. `text` gives what it brought of the answer, as ids.
    pub fn accept(&mut self, token: u32, reply: &Reply, text: impl FnOnce() -> Vec<u32>) {
        let Some(constraint) = &self.constraint else { return };
        let holds = match constraint.start {
            Start::Answer => !reply.in_thought(),
            Start::Call => reply.in_call(),
        };
        match std::mem::replace(&mut self.state, State::Idle) {
            _ if !holds => {}
            State::Ready(masked) => self.ask(masked.matcher, vec![token]),
            State::Idle => {
                let matcher = Box::new(constraint.matcher());
                // What came together with the end of the thought belongs to the answer. (Behind the opening tag of
                // a call nothing comes with it that counts.)
                let tokens = if constraint.start == Start::Answer { text() } else { Vec::new() };
                self.ask(matcher, tokens);
            }
            // Nothing is drawn before its mask is there.
            State::Pending(pending) => self.state = State::Pending(pending),
        }
    }

    /// What the next token may be. `thought`: tokens of the thought so far.
    pub fn choice(&self, reply: &Reply, thought: u32) -> Choice {
        if let Some((budget, close)) = &self.budget
            && reply.in_thought()
            && thought + 1 >= *budget
        {
            return Choice::Of(Arc::clone(close));
        }
        match (&self.state, &self.constraint) {
            (State::Ready(masked), _) => Choice::Of(Arc::clone(&masked.mask)),
            (State::Pending(_), _) => Choice::Unknown,
            // A turn that ended inside its thought would never come to what it is held to.
            (State::Idle, Some(constraint)) if constraint.start == Start::Answer => {
                Choice::Of(Arc::clone(&constraint.unfinished))
            }
            (State::Idle, _) => Choice::Any,
        }
    }

    /// Waits for a mask that is being computed; `None`: it is not there at the deadline.
    pub fn wait(&mut self, deadline: Option<Instant>) -> Option<Result<(), String>> {
        let State::Pending(pending) = &self.state else { return Some(Ok(())) };
        Some(wait(pending, deadline)?.map(|masked| self.state = State::Ready(masked)))
    }

    fn ask(&mut self, matcher: Box<Matcher>, tokens: Vec<u32>) {
        self.state = State::Pending(self.masks.ask(matcher, tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constraint::{Compiler, Outline, Rule};
    use crate::request::OutputFormat;
    use crate::testing::{END_OF_TURN, tokenizer, tokens};

    #[test]
    fn what_comes_with_the_end_of_the_thought_belongs_to_the_answer() {
        let compiler = Compiler::new(Arc::new(tokenizer()), 300, vec![END_OF_TURN]);
        let outline = Outline { answer: Some(Rule::Regex("abc".into())), calls: None };
        let constraint = compiler.compile(&outline, true).unwrap();
        let mut guide = Guide::new(constraint, None, Masks::start().unwrap());
        let format = OutputFormat::Chat { starts_in_thought: true, tools: Arc::new([]), single_call: false };
        let mut reply = Reply::new(&format, &[]);
        guide.begin(&reply);
        let allowed = |guide: &Guide, reply: &Reply| match guide.choice(reply, 1) {
            Choice::Of(mask) => (0..300).filter(|i| mask[i / 32] >> (i % 32) & 1 == 1).collect::<Vec<_>>(),
            _ => panic!("no mask is there"),
        };
        assert_eq!(allowed(&guide, &reply).len(), 299, "all but the end of the turn");
        // A token of a larger vocabulary.
        reply.push(b"Hm.</think>a");
        guide.accept(299, &reply, || tokens("a"));
        assert!(matches!(guide.choice(&reply, 1), Choice::Unknown));
        guide.wait(None).unwrap().unwrap();
        assert_eq!(allowed(&guide, &reply), [usize::from(b'b')]);
    }
}

//! `lily chat`: a conversation in the terminal.

use std::io::{self, BufRead, IsTerminal, Write};
use std::thread;

use anyhow::{Context, Result, bail};
use lily_engine::chat::Chat as Conversation;
use lily_engine::output::Delta;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, channel};

use crate::args::{Chat, Global};
use crate::interrupt::{Interrupted, Interrupts};
use crate::printer::Printer;
use crate::session::{End, Session, runtime};

const HELP: &str = "/clear starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer, twice leaves";

/// Runs the command.
pub fn chat(args: &Chat, global: &Global) -> Result<()> {
    let session = Session::start(
        global,
        args.generation.context.ctx_size,
        args.generation.reading.ubatch_size,
        1,
        args.cache.bytes(),
    )?;
    runtime()?.block_on(talk(&session, args))
}

async fn talk(session: &Session, args: &Chat) -> Result<()> {
    let interrupts = Interrupts::listen()?;
    let prompt = Prompt { shown: io::stdin().is_terminal() };
    prompt.say(&format!("{}: {HELP}", session.name))?;
    let system: Vec<Value> =
        args.talk.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
    let mut messages = system.clone();
    let mut lines = read_lines();
    loop {
        prompt.ask()?;
        let line = tokio::select! {
            // First, so that a Ctrl-C from before this line can't stop the answer to it.
            biased;
            () = interrupts.first() => {
                prompt.say("\nCtrl-C again, or /exit, leaves")?;
                continue;
            }
            line = lines.recv() => line.transpose().context("standard input can't be read")?,
        };
        interrupts.forget();
        match line.as_deref().map(str::trim) {
            None | Some("/exit" | "/quit") => return Ok(()),
            Some("") => {}
            Some("/clear") => {
                messages.clone_from(&system);
                prompt.say("the conversation starts over")?;
            }
            Some("/help") => prompt.say(HELP)?,
            Some(command) if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                prompt.say(&format!("there is no {command}: {HELP}"))?;
            }
            Some(text) => {
                messages.push(json!({"role": "user", "content": text}));
                if let Some(reply) = answer(session, args, &messages, &interrupts).await? {
                    messages.push(reply);
                } else {
                    messages.pop();
                }
            }
        }
        if !prompt.shown && interrupts.is_pending() {
            bail!(Interrupted);
        }
    }
}

/// Prints the answer to a conversation and returns it as a message; `None` if there could not be one.
async fn answer(
    session: &Session,
    args: &Chat,
    messages: &[Value],
    interrupts: &Interrupts,
) -> Result<Option<Value>> {
    let enable_thinking = args.talk.no_think.then_some(false);
    let chat = Conversation { messages: messages.to_vec(), enable_thinking, ..Conversation::default() };
    let (mut text, mut thought) = (String::new(), String::new());
    let mut printer = Printer::new();
    let request = session.chat_request(&chat, &args.generation)?;
    let end = session.generate(request, interrupts, |delta| {
        printer.print(&delta)?;
        match delta {
            Delta::Text(piece) => text += &piece,
            Delta::Reasoning(piece) => thought += &piece,
            // There are no tools here.
            Delta::ToolCall { .. } | Delta::ToolArguments { .. } => {}
        }
        Ok(())
    });
    let end = end.await;
    printer.finish()?;
    match end {
        Ok(End::Finished(_) | End::Interrupted) => {
            Ok(Some(json!({"role": "assistant", "content": text, "reasoning_content": thought})))
        }
        Err(e) if e.is::<lily_engine::request::SubmitError>() => {
            writeln!(io::stderr(), "{e}; /clear starts over")?;
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// Lines of standard input, read on a thread of their own so that Ctrl-C is heard meanwhile.
fn read_lines() -> Receiver<io::Result<String>> {
    let (sender, receiver) = channel(1);
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// What is said between answers; nothing if nobody types.
struct Prompt {
    shown: bool,
}

impl Prompt {
    fn ask(&self) -> io::Result<()> {
        if self.shown {
            write!(io::stderr(), "> ")?;
        }
        io::stderr().flush()
    }

    fn say(&self, text: &str) -> io::Result<()> {
        if self.shown { writeln!(io::stderr(), "{text}") } else { Ok(()) }
    }
}

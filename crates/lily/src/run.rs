//! `lily run`: one prompt, one answer.

use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use lily_engine::chat::Chat;
use lily_engine::output::Delta;
use lily_engine::request::{FinishReason, Finished, Request};
use serde_json::{Value, json};

use crate::args::{Global, Run, UsageError};
use crate::interrupt::{Interrupted, Interrupts};
use crate::printer::Printer;
use crate::session::{End, Session, runtime, speeds};

/// Runs the command.
pub fn run(args: &Run, global: &Global) -> Result<()> {
    let prompt = prompt(args)?;
    let tools = args.tools.as_deref().map(read_tools).transpose()?.unwrap_or_default();
    // There is no second prompt that a cache could help.
    let session =
        Session::start(global, args.generation.context.ctx_size, args.generation.reading.ubatch_size, 1, 0)?;
    let request = if args.raw {
        raw_request(&session, &prompt, args)
    } else {
        let system = args.talk.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages = system.chain([json!({"role": "user", "content": prompt})]).collect();
        let enable_thinking = args.talk.no_think.then_some(false);
        let chat = Chat { messages, tools, enable_thinking, ..Chat::default() };
        session.chat_request(&chat, &args.generation)?
    };
    runtime()?.block_on(answer(&session, request, args.json))
}

fn prompt(args: &Run) -> Result<String> {
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None if io::stdin().is_terminal() => {
            bail!(UsageError(
                "no prompt: give one as an argument, `lily run \"Hello\"`, or on standard input".into()
            ))
        }
        None => read_stdin()?,
    };
    // White space alone is a prompt only where it is taken as it is.
    if if args.raw { prompt.is_empty() } else { prompt.trim().is_empty() } {
        bail!(UsageError("the prompt is empty: give some text as an argument or on standard input".into()));
    }
    Ok(prompt)
}

/// All of standard input, less the newline that ends its last line.
fn read_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    io::stdin().read_to_end(&mut bytes).context("standard input can't be read")?;
    let text = String::from_utf8(bytes).context("standard input is not UTF-8 text")?;
    Ok(text.strip_suffix('\n').map(str::to_owned).unwrap_or(text))
}

fn read_tools(file: &Path) -> Result<Vec<Value>> {
    let text = fs::read(file).with_context(|| file.display().to_string())?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{}: expected a JSON list of tool definitions", file.display()))
}

fn raw_request(session: &Session, prompt: &str, args: &Run) -> Request {
    let prompt = session.model.tokenizer.encode_with_control(prompt);
    Request {
        max_tokens: args.generation.max_tokens,
        stop: args.generation.stop.clone(),
        cache_prompt: false,
        ..Request::raw(prompt, session.sampling(&args.generation))
    }
}

async fn answer(session: &Session, request: Request, json: bool) -> Result<()> {
    let interrupts = Interrupts::listen()?;
    let mut printer = Printer::new();
    let mut reply = Reply::default();
    let end = session
        .generate(request, &interrupts, |delta| {
            if json {
                reply.push(delta)
            } else {
                printer.print(&delta)?
            }
            Ok(())
        })
        .await?;
    if !json {
        printer.finish()?;
    }
    match end {
        End::Interrupted => bail!(Interrupted),
        End::Finished(finished) if json => {
            writeln!(io::stdout(), "{:#}", reply.to_json(session, &finished))?;
        }
        End::Finished(_) => {}
    }
    Ok(())
}

/// A reply put together from its pieces.
#[derive(Default)]
struct Reply {
    text: String,
    reasoning: String,
    /// Id, name and JSON text of the arguments.
    calls: Vec<(String, String, String)>,
}

impl Reply {
    fn push(&mut self, delta: Delta) {
        match delta {
            Delta::Text(text) => self.text += &text,
            Delta::Reasoning(text) => self.reasoning += &text,
            Delta::ToolCall { id, name, .. } => self.calls.push((id, name, String::new())),
            Delta::ToolArguments { index, fragment } => {
                if let Some(call) = self.calls.get_mut(index as usize) {
                    call.2 += &fragment;
                }
            }
        }
    }

    fn to_json(&self, session: &Session, finished: &Finished) -> Value {
        let call = |(id, name, arguments): &(String, String, String)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let (prefill_speed, decode_speed) = speeds(finished);
        json!({
            "model": session.name,
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": self.calls.iter().map(call).collect::<Value>(),
            "finish_reason": match finished.reason {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
                FinishReason::ToolCalls => "tool_calls",
            },
            "prompt_tokens": finished.usage.prompt_tokens,
            "completion_tokens": finished.usage.completion_tokens,
            "reasoning_tokens": finished.usage.reasoning_tokens,
            "load_seconds": session.load_time.as_secs_f64(),
            "prefill_seconds": finished.timing.prefill.as_secs_f64(),
            "decode_seconds": finished.timing.decode.as_secs_f64(),
            "prefill_tokens_per_second": prefill_speed,
            "decode_tokens_per_second": decode_speed,
        })
    }
}

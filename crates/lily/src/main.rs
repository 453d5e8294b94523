//! The `lily` command.

mod args;
mod bench;
mod chat;
mod device;
mod doctor;
mod eval;
mod inspect;
mod interrupt;
mod log;
mod logits;
mod printer;
mod progress;
mod run;
mod serve;
mod session;
mod source;
mod synth;

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command, UsageError};
use interrupt::Interrupted;

/// Also what clap ends with.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let args = Args::parse();
    log::start(args.global.verbose, matches!(args.command, Command::Serve(_)), args.global.log_format);
    let Err(error) = execute(&args) else { return ExitCode::SUCCESS };
    if error.is::<Interrupted>() {
        return ExitCode::from(interrupt::EXIT_CODE);
    }
    if is_broken_pipe(&error) {
        // The reader has what it wanted: `lily run ... | head -1`.
        return ExitCode::SUCCESS;
    }
    // There is nobody to tell if this fails.
    let _ = writeln!(io::stderr(), "error: {error:#}");
    if error.is::<UsageError>() { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
}

fn execute(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    match &args.command {
        Command::Run(command) => run::run(command, &args.global),
        Command::Chat(command) => chat::chat(command, &args.global),
        Command::Serve(command) => serve::serve(command, &args.global),
        Command::Inspect(command) => inspect::inspect(command, &args.global),
        Command::Synth(command) => synth::synth(command),
        Command::Logits(command) => logits::logits(command, &args.global),
        Command::Eval(command) => eval::eval(command, &args.global),
        Command::Bench(command) => bench::bench(command, &args.global),
        Command::Doctor(command) => doctor::doctor(command, &args.global),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe))
}

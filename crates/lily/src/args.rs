//! The command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, Subcommand, ValueEnum};
use lily_server::cors::Origin;

/// Runs Qwen3.6-35B-A3B and models of its family, from files on this machine.
#[derive(Debug, Parser)]
#[command(name = "lily", version, propagate_version = true)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub global: Global,
}

/// Options of every command.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options of every command")]
pub struct Global {
    /// Folder of the model: config.json, tokenizer.json, *.safetensors. Default: the small demonstration model
    /// inside the program
    #[arg(short, long, global = true, env = "LILY_MODEL", value_name = "FOLDER")]
    pub model: Option<PathBuf>,
    /// On the CPU: threads to compute with. Default: one per core
    #[arg(short, long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Where to compute: auto (on a Mac its GPU if that can run the model, else the CPU), cpu, cuda or cuda:N, metal
    #[arg(long, global = true, default_value = "auto", value_name = "DEVICE")]
    pub device: DeviceChoice,
    /// On the CPU: compute with f32 activations and an f32 K/V cache instead of int8 and bf16. Slower, for verification
    #[arg(long, global = true)]
    pub cpu_exact: bool,
    /// On a Mac's GPU: let the system page weights out between requests, instead of keeping them resident. For machines
    /// that can't bear it
    #[arg(long, global = true)]
    pub metal_no_residency: bool,
    /// On the GPU of an M5 or later: do without the tensor operations of Metal 4. Prompts are then read more slowly, and not rounded
    /// to 16 bits
    #[arg(long, global = true)]
    pub metal_no_tensor: bool,
    /// On a Mac's GPU: copy weights that lie at odd places in their files to memory at every start, instead of keeping an
    /// aligned copy beside the files
    #[arg(long, global = true)]
    pub metal_no_aligned_copies: bool,
    /// Say more on standard error; twice for even more. LILY_LOG takes filters like `lily_engine=debug`
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Form of the log's lines
    #[arg(long, global = true, value_enum, default_value_t, env = "LILY_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// A form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line; `span` has the request's id, method and path.
    Json,
}

/// A kind of device that an option is for: `--device` with this name chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cpu,
    Cuda,
    Metal,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Metal => "metal",
        }
    }
}

impl Args {
    /// Refuses options that don't go together, and those that the chosen device would not heed.
    pub fn check(&self) -> Result<(), UsageError> {
        self.check_on(cfg!(target_vendor = "apple"))
    }

    /// As [`check`](Self::check), on a Mac or elsewhere.
    fn check_on(&self, mac: bool) -> Result<(), UsageError> {
        let device = self.global.device;
        let kinds: &[Kind] = match device {
            DeviceChoice::Cpu => &[Kind::Cpu],
            DeviceChoice::Cuda(_) => &[Kind::Cuda],
            DeviceChoice::Metal => &[Kind::Metal],
            // It lists what a GPU does for those who name one.
            DeviceChoice::Auto if matches!(self.command, Command::Inspect(_)) => &[Kind::Cpu],
            DeviceChoice::Auto if mac && !self.global.cpu_exact => &[Kind::Metal, Kind::Cpu],
            DeviceChoice::Auto => &[Kind::Cpu],
        };
        for (option, given, kind) in self.options_of_devices() {
            if given && !kinds.contains(&kind) {
                let cpu = device == DeviceChoice::Auto && kinds == [Kind::Cpu];
                let found = if cpu { ", which means cpu here" } else { "" };
                let name = kind.name();
                return Err(UsageError(format!(
                    "{option} is for --device {name}, and this is --device {device}{found}: leave {option} out, or give --device {name}"
                )));
            }
        }
        match &self.command {
            Command::Inspect(inspect) if inspect.metal_tensor && self.global.metal_no_tensor => Err(UsageError(
                "--metal-tensor is for the kernels that --metal-no-tensor leaves out: leave one of them out".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// Options that only one kind of device heeds, and whether they were given.
    fn options_of_devices(&self) -> Vec<(&'static str, bool, Kind)> {
        let global = &self.global;
        let mut options = vec![
            ("--threads", global.threads.is_some(), Kind::Cpu),
            ("--cpu-exact", global.cpu_exact, Kind::Cpu),
            ("--metal-no-residency", global.metal_no_residency, Kind::Metal),
            ("--metal-no-tensor", global.metal_no_tensor, Kind::Metal),
            ("--metal-no-aligned-copies", global.metal_no_aligned_copies, Kind::Metal),
        ];
        match &self.command {
            Command::Inspect(inspect) => options.push(("--metal-tensor", inspect.metal_tensor, Kind::Metal)),
            Command::Bench(bench) => options.extend([
                ("--profile", bench.profile, Kind::Cuda),
                ("--synth", bench.synth.is_some(), Kind::Cuda),
            ]),
            _ => {}
        }
        options
    }
}

/// A device to compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The GPU of a Mac, if it can run the model; else the processor.
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA GPU, by its number.
    Cuda(usize),
    /// The GPU of a Mac.
    Metal,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
            Self::Metal => f.write_str("metal"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |n: &str| n.parse().map(Self::Cuda).map_err(|_| format!("{n:?} is no number of a GPU"));
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            None if text == "metal" => Ok(Self::Metal),
            Some(("cuda", n)) => number(n),
            _ => Err("expected auto, cpu, cuda, cuda:N or metal".to_owned()),
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt
    Run(Run),
    /// Talk in the terminal
    Chat(Chat),
    /// Serve the OpenAI-compatible API
    Serve(Serve),
    /// Show a model's shapes, sizes and memory needs, without loading it
    Inspect(Inspect),
    /// Write a random checkpoint, for measuring and testing
    Synth(Synth),
    /// Write the logits of every position of a sequence, for comparing
    Logits(Logits),
    /// Measure how well the model predicts a text: perplexity, bits per byte
    Eval(Eval),
    /// Measure speed: tokens a second while reading a prompt and while writing
    Bench(Bench),
    /// Show what Lily finds on this machine: devices, their memory, versions
    Doctor(Doctor),
}

#[derive(Debug, clap::Args)]
pub struct Doctor {
    /// On a Mac: compile every Metal kernel, run each on the GPU against the CPU, with the weights of the model, and print a table
    #[arg(long)]
    pub metal_selftest: bool,
    /// Write the Metal kernels for the model to a file, so that another compiler can look at them
    #[arg(long, value_name = "FILE")]
    pub metal_source: Option<PathBuf>,
    /// With --metal-source: the kernels that an M5 or later gets, in version 4.0 of the language instead of 3.1
    #[arg(long, requires = "metal_source")]
    pub metal_tensor: bool,
}

#[derive(Debug, clap::Args)]
pub struct Run {
    /// The prompt. Default: what comes on standard input
    pub prompt: Option<String>,
    /// Print one JSON object: text, token counts, times
    #[arg(long)]
    pub json: bool,
    /// Continue the prompt as plain text, without the chat template. Control tokens like <|im_start|> are read
    #[arg(long, conflicts_with_all = ["system", "no_think", "tools"])]
    pub raw: bool,
    /// Tools the model may call: a JSON list of definitions in OpenAI's form
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    #[command(flatten)]
    pub talk: Talk,
    #[command(flatten)]
    pub generation: Generation,
}

#[derive(Debug, clap::Args)]
pub struct Chat {
    #[command(flatten)]
    pub talk: Talk,
    #[command(flatten)]
    pub cache: CacheSize,
    #[command(flatten)]
    pub generation: Generation,
}

/// The form of a conversation.
#[derive(Debug, clap::Args)]
pub struct Talk {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Answer at once, without a thought
    #[arg(long)]
    pub no_think: bool,
}

/// How text is generated. What is left out is as the model's generation_config.json says.
#[derive(Debug, clap::Args)]
pub struct Generation {
    /// Most tokens to generate. Default: to the end of the context
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Randomness; 0 always takes the most likely token
    #[arg(long, alias = "temp", value_name = "X")]
    pub temperature: Option<f32>,
    /// Draw from the N most likely tokens; 0 from all
    #[arg(long, value_name = "N")]
    pub top_k: Option<u32>,
    /// Draw from the most likely tokens that make up this share of probability
    #[arg(long, value_name = "X")]
    pub top_p: Option<f32>,
    /// Draw from tokens at least this fraction as likely as the most likely one
    #[arg(long, value_name = "X")]
    pub min_p: Option<f32>,
    /// Make tokens that have occurred less likely; 1 is off
    #[arg(long, value_name = "X")]
    pub repeat_penalty: Option<f32>,
    /// The same seed gives the same text. Default: another one every time
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// End the answer where this text begins. May be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub context: Context,
    #[command(flatten)]
    pub reading: Reading,
}

/// The length of sequences.
#[derive(Debug, clap::Args)]
pub struct Context {
    /// Longest sequence, prompt and answer together. Default: 32768, or the model's own limit if it is lower
    #[arg(short, long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub ctx_size: Option<u32>,
}

/// How prompts are read.
#[derive(Debug, clap::Args)]
pub struct Reading {
    /// Tokens of a prompt that one step reads at most. More read faster up to a point, take more memory, and make others wait
    /// longer. Default: 512; on NVIDIA's Hopper and with the tensor operations of an M5 2048
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ubatch_size: Option<u32>,
}

/// The size of the prefix cache.
#[derive(Debug, clap::Args)]
pub struct CacheSize {
    /// Memory for states of what was read before, so that a prompt which starts alike is not read again. It comes on
    /// top of that for running requests; 0 turns it off
    #[arg(long, default_value_t = 2048, value_name = "MIB")]
    pub cache_ram: u32,
}

impl CacheSize {
    /// In bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.cache_ram) << 20
    }
}

/// A year: a limit that can be added to any time.
const MAX_SECONDS: u64 = 365 * 24 * 3600;

#[derive(Debug, clap::Args)]
pub struct Serve {
    /// Address to listen on
    #[arg(long, default_value = lily_server::serve::DEFAULT_HOST)]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = lily_server::serve::DEFAULT_PORT)]
    pub port: u16,
    /// What clients must send as `Authorization: Bearer KEY`
    #[arg(long, env = "LILY_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Serve other machines without an API key
    #[arg(long)]
    pub insecure: bool,
    /// Take requests that are addressed to this name too, say of a proxy on this machine; may be given several times
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Let web pages from this origin, say https://app.example, use the server; * stands for all. May be given several
    /// times. Default: none
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<Origin>,
    /// Encrypt connections (TLS): the server's certificate, followed by those that vouch for it, in PEM form
    #[arg(long, requires = "tls_key", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key, in PEM form
    #[arg(long, requires = "tls_cert", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Longest time from a request to the end of its answer; 0: none
    #[arg(long, default_value_t = 0, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub request_timeout: u64,
    /// Longest time that a request which is worked on may make no progress; 0: none
    #[arg(long, default_value_t = 0, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub idle_timeout: u64,
    /// Longest time that the device may finish nothing while it has work; then the server ends. 0: none
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub stall_timeout: u64,
    /// Time that running answers get to finish after the first Ctrl-C
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub shutdown_timeout: u64,
    /// Send a trace of each request to an OpenTelemetry collector, by OTLP over HTTP: http://HOST:PORT
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Requests worked on side by side; memory is set aside for as many sequences of full length
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_sequences: u32,
    #[command(flatten)]
    pub cache: CacheSize,
    #[command(flatten)]
    pub context: Context,
    #[command(flatten)]
    pub reading: Reading,
}

#[derive(Debug, clap::Args)]
pub struct Inspect {
    /// A model known by name, instead of --model
    #[arg(long)]
    pub preset: Option<Preset>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// With --device metal: the kernels that an M5 or later gets, whatever is here
    #[arg(long)]
    pub metal_tensor: bool,
    #[command(flatten)]
    pub context: Context,
}

/// A model whose shapes are known without its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// The demonstration model
    Demo,
    /// Qwen3.6-35B-A3B in 4 bits
    #[value(name = "35b-a3b")]
    Qwen35bA3b,
}

#[derive(Debug, clap::Args)]
pub struct Synth {
    /// Shapes of the checkpoint
    #[arg(long)]
    pub preset: Preset,
    /// Only the first N layers, at full width. Default: all
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// The same seed gives the same bytes
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Folder to write into: empty, or not yet there
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct Logits {
    /// File with token ids, separated by commas or white space
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// File to write: safetensors with one f32 tensor `logits`, [tokens, vocabulary]
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Compute with the reference implementation: slow, plain f32
    #[arg(long)]
    pub reference: bool,
}

#[derive(Debug, clap::Args)]
pub struct Eval {
    /// The text: a UTF-8 file. Control tokens spelled out in it are read as text
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Tokens of a window: the text is cut into pieces of this length, each predicted from its own beginning
    #[arg(long, default_value_t = 1024, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub window: u32,
    /// Stop after so many tokens of the text
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct Bench {
    /// Lengths of prompts to read, separated by commas
    #[arg(long, default_value = "512", value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: Vec<u32>,
    /// Measure on the beginning of this text too, besides token ids that are scattered over the vocabulary
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Tokens to write after each
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub decode_tokens: u32,
    /// Sequences that read such a prompt, one after another, and then write side by side; separated by commas
    #[arg(long, default_value = "1", value_delimiter = ',', value_name = "N,...", conflicts_with = "text", value_parser = clap::value_parser!(u32).range(1..=32))]
    pub batch: Vec<u32>,
    /// Measured runs, after one that warms up
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Measure a model of random weights that are made in the memory of an NVIDIA GPU, instead of --model
    #[arg(long, value_name = "PRESET", conflicts_with = "text")]
    pub synth: Option<Preset>,
    /// On an NVIDIA GPU: measure each kernel of a decode step and of a prompt's last chunk too
    #[arg(long)]
    pub profile: bool,
    /// Measure the machine alone, without a model: memory bandwidth and int8 multiply-adds, from one thread up to all
    #[arg(long, conflicts_with_all = ["prompt_tokens", "text", "decode_tokens", "batch", "repeat", "synth", "profile"])]
    pub probe: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub reading: Reading,
}

/// A command that can't be meant as it was given.
#[derive(Debug)]
pub struct UsageError(pub String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn devices_are_named_as_elsewhere() {
        let device = |text: &str| text.parse::<DeviceChoice>().ok();
        assert_eq!(device("auto"), Some(DeviceChoice::Auto));
        assert_eq!(device("cpu"), Some(DeviceChoice::Cpu));
        assert_eq!(device("metal"), Some(DeviceChoice::Metal));
        assert_eq!(
            (device("cuda"), device("cuda:3")),
            (Some(DeviceChoice::Cuda(0)), Some(DeviceChoice::Cuda(3)))
        );
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cpu:1", "cuda:-1", "metal:0"] {
            assert_eq!(device(wrong), None, "{wrong}");
        }
    }

    /// What is wrong with a command line, on a Mac or elsewhere.
    fn problem(line: &str, mac: bool) -> Option<String> {
        let args = Args::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        args.check_on(mac).err().map(|e| e.0)
    }

    #[test]
    fn options_that_the_device_would_not_heed_are_refused() {
        let refused = [
            ("run --cpu-exact", "cpu", ["cuda:1", "metal"]),
            ("bench --threads 2", "cpu", ["cuda", "metal"]),
            ("bench --profile", "cuda", ["cpu", "metal"]),
            ("bench --synth demo", "cuda", ["cpu", "metal"]),
            ("inspect --metal-tensor", "metal", ["cpu", "cuda"]),
            ("inspect --metal-no-tensor", "metal", ["cpu", "cuda:2"]),
            ("serve --metal-no-residency", "metal", ["cpu", "cuda"]),
            ("chat --metal-no-aligned-copies", "metal", ["cpu", "cuda"]),
        ];
        for (command, right, wrong) in refused {
            let option = command.split(' ').nth(1).unwrap();
            for mac in [false, true] {
                for device in wrong {
                    let found = problem(&format!("lily {command} --device {device}"), mac);
                    let expected = format!(
                        "{option} is for --device {right}, and this is --device {device}: leave {option} out, or give --device {right}"
                    );
                    assert_eq!(found, Some(expected));
                }
                assert_eq!(problem(&format!("lily {command} --device {right}"), mac), None);
                // What `auto` stands for depends on the system; what is inspected must be named.
                let gpu = mac && !command.starts_with("inspect");
                let heeded = right == "cpu" || right == "metal" && gpu;
                let found = problem(&format!("lily {command}"), mac);
                assert_eq!(found.is_none(), heeded, "{command}: {found:?}");
                let found = found.unwrap_or_default();
                assert_eq!(found.contains("--device auto, which means cpu here"), !heeded && !gpu, "{found}");
            }
        }
        // With it, `auto` is the CPU on a Mac too.
        assert!(
            problem("lily run --cpu-exact --metal-no-tensor", true).unwrap().contains("--metal-no-tensor")
        );
    }

    #[test]
    fn tensor_operations_are_asked_for_or_left_out() {
        for line in [
            "lily inspect --device metal --metal-tensor --metal-no-tensor",
            "lily --metal-no-tensor --device metal inspect --metal-tensor",
        ] {
            let why = problem(line, false).unwrap();
            assert!(why.contains("--metal-tensor") && why.contains("--metal-no-tensor"), "{why}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}

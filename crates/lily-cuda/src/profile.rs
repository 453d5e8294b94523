//! What each kernel of a step costs: steps are repeated as they were, with the kernel alone and with all but it. Both
//! count, since kernels overlap: alone one pays for its start, and in the step it may hide behind its neighbours. A kernel
//! whose bytes of all layers fit into the L2 cache finds them there when it is alone. Times of decode steps are means of
//! steps that follow each other, as one of a few writes recurrent states.

use std::ops::Range;
use std::sync::Arc;

use lily_model::backend::{Backend, BackendError, Batch, Segment, SeqId, Tokens, Want};
use lily_model::sample::SampleParams;

use crate::CudaBackend;
use crate::device::{Launch, traffic};
use crate::driver::{Context, DriverError, Event, Graph};
use crate::gdn::PENDING;
use crate::step::Plan;

/// Tokens that a profile decodes behind its prompt, so that each sequence writes its states once.
pub const TOKENS: u32 = PENDING as u32 + 1;

/// Steps of one measurement, and measurements of which the median counts.
const STEPS: u32 = 10;
const MEASUREMENTS: usize = 3;

/// Bytes of the two buffers that bandwidth is measured with, if there is room: far more than the L2 cache has.
const COPIED: usize = 2 << 30;

/// What a profiled step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// So many sequences decode a token each.
    Decode(usize),
    /// So many tokens of one prompt are read.
    Chunk(usize),
}

/// All launches of a kernel in a step.
#[derive(Clone, Debug)]
pub struct KernelCost {
    /// Name.
    pub name: &'static str,
    /// Launches a step.
    pub launches: usize,
    /// Bytes of weights and state that they move together. Weights count once, however many tokens they are read for; keys and
    /// values count for each token.
    pub bytes: u64,
    /// Microseconds of a step with nothing but them.
    pub alone_us: f64,
    /// Microseconds that a step saves without them; may be less than nothing. Of a chunk it may say little: without a kernel tokens may
    /// choose other experts, which changes what theirs cost.
    pub in_step_us: f64,
}

/// A step, kernel by kernel.
#[derive(Clone, Debug)]
pub struct Profile {
    /// What it does.
    pub work: Work,
    /// Tokens of a sequence before it.
    pub position: u32,
    /// Microseconds of the whole step on the device.
    pub step_us: f64,
    /// Bytes a second that the device reads and writes when it copies.
    pub copy_bytes_per_s: f64,
    /// In the order in which they first run.
    pub kernels: Vec<KernelCost>,
}

impl Work {
    /// Tokens of all sequences.
    pub fn tokens(self) -> usize {
        match self {
            Self::Decode(tokens) | Self::Chunk(tokens) => tokens,
        }
    }

    fn plan(self) -> Plan {
        match self {
            Self::Decode(sequences) => Plan::decoding(sequences),
            Self::Chunk(tokens) => Plan::reading(tokens),
        }
    }

    /// Tokens of its sequence before one of the step's, on average.
    fn mean_position(self, position: u32) -> u32 {
        match self {
            Self::Decode(_) => position,
            Self::Chunk(tokens) => position + tokens as u32 / 2,
        }
    }
}

/// Bytes a second that the device reads and writes when it copies.
pub fn copy_bandwidth(context: &Arc<Context>) -> Result<f64, DriverError> {
    let bytes = (context.memory()?.0 / 4).min(COPIED);
    let from = context.allocate(bytes, "measuring bandwidth")?;
    let to = context.allocate(bytes, "measuring bandwidth")?;
    // Not zeros: memory may be faster with them.
    context.fill(from.address(), 0xA5, bytes)?;
    let us = median_us(context, || context.copy(to.address(), from.address(), bytes))?;
    Ok(2.0 * bytes as f64 / us * 1e6)
}

/// Microseconds of what `enqueue` enqueues, with others like it before and behind.
pub fn median_us(
    context: &Arc<Context>,
    enqueue: impl Fn() -> Result<(), DriverError>,
) -> Result<f64, DriverError> {
    let (begin, end) = (Event::new(context)?, Event::new(context)?);
    (0..3).try_for_each(|_| enqueue())?;
    let mut times = Vec::new();
    for _ in 0..MEASUREMENTS {
        begin.record()?;
        (0..STEPS).try_for_each(|_| enqueue())?;
        end.record()?;
        end.wait()?;
        times.push(f64::from(end.since(&begin)?) * 1e3 / f64::from(STEPS));
    }
    times.sort_by(f64::total_cmp);
    Ok(times[MEASUREMENTS / 2])
}

impl CudaBackend {
    /// Bytes a second that the device reads and writes when it copies.
    pub fn copy_bandwidth(&self) -> Result<f64, DriverError> {
        copy_bandwidth(self.context())
    }

    /// Reads prompts of `position` tokens into `batch` sequences, and profiles the steps behind them.
    pub fn profile(&mut self, batch: usize, position: u32) -> Result<Profile, BackendError> {
        let seqs = (0..batch).map(|_| self.create(position + TOKENS)).collect::<Result<Vec<_>, _>>()?;
        for (i, seq) in seqs.iter().enumerate() {
            self.read(*seq, 0..position, i as u32, &Want::Sample(SampleParams::greedy().into()))?;
        }
        let mut steps = Vec::new();
        for start in position..position + TOKENS {
            let next = |seq: &SeqId| Segment {
                seq: *seq,
                start,
                tokens: Tokens::LastSampled,
                want: Want::Sample(SampleParams::greedy().into()),
            };
            let ticket = self.forward(&Batch { segments: seqs.iter().map(next).collect() })?;
            self.wait(ticket)?;
            steps.push(self.description(batch)?);
        }
        let profile = self.repeat(&steps, Work::Decode(batch), position)?;
        seqs.into_iter().try_for_each(|seq| self.free(seq))?;
        Ok(profile)
    }

    /// Reads a prompt of `end` tokens, and profiles the step that reads the last `tokens` of them, or all if there are fewer. Nothing is
    /// drawn in it.
    pub fn profile_chunk(&mut self, tokens: u32, end: u32) -> Result<Profile, BackendError> {
        let tokens = tokens.min(end).min(self.limits().max_batch_tokens);
        let position = end - tokens;
        let seq = self.create(end)?;
        self.read(seq, 0..position, 0, &Want::Nothing)?;
        self.read(seq, position..end, 0, &Want::Nothing)?;
        let step = self.description(tokens as usize)?;
        let profile = self.repeat(&[step], Work::Chunk(tokens as usize), position)?;
        self.free(seq)?;
        Ok(profile)
    }

    /// What the device was last told about a step of so many tokens.
    fn description(&mut self, tokens: usize) -> Result<Vec<u8>, DriverError> {
        let device = self.device();
        let mut bytes = vec![0; device.layout.head(tokens)];
        device.buffers.step.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Feeds a sequence a part of a prompt, in as few steps as possible; `want`: of the last one.
    fn read(&mut self, seq: SeqId, part: Range<u32>, salt: u32, want: &Want) -> Result<(), BackendError> {
        let (vocab, most) = (self.limits().vocab_size, self.limits().max_batch_tokens);
        for start in part.clone().step_by(most as usize) {
            let end = part.end.min(start + most);
            let ids = (start..end).map(|i| (i + 7919 * salt).wrapping_mul(2_654_435_761) % vocab).collect();
            let want = if end == part.end { want.clone() } else { Want::Nothing };
            let ticket = self
                .forward(&Batch { segments: vec![Segment { seq, start, tokens: Tokens::Ids(ids), want }] })?;
            self.wait(ticket)?;
        }
        Ok(())
    }

    fn repeat(&mut self, steps: &[Vec<u8>], work: Work, position: u32) -> Result<Profile, BackendError> {
        let copy_bytes_per_s = self.copy_bandwidth()?;
        let plan = work.plan();
        let (step, launches) = self.graph_without(&plan, &[])?;
        let step_us = self.time(steps, &step)?;
        let mut names: Vec<&'static str> = Vec::new();
        for launch in &launches {
            if !names.contains(&launch.name) {
                names.push(launch.name);
            }
        }
        let mut kernels = Vec::new();
        for &name in &names {
            let mine: Vec<Launch> = launches.iter().filter(|l| l.name == name).cloned().collect();
            let others: Vec<&str> = names.iter().copied().filter(|n| *n != name).collect();
            let (alone, _) = self.graph_without(&plan, &others)?;
            let moved = traffic(&mine);
            kernels.push(KernelCost {
                name,
                launches: mine.len(),
                bytes: moved.bytes + moved.bytes_per_position * u64::from(work.mean_position(position)),
                alone_us: self.time(steps, &alone)?,
                in_step_us: 0.0,
            });
        }
        // Behind all that: without a kernel activations and states become anything, and with them the experts that tokens choose.
        for kernel in &mut kernels {
            let (without, _) = self.graph_without(&plan, &[kernel.name])?;
            kernel.in_step_us = step_us - self.time(steps, &without)?;
        }
        Ok(Profile { work, position, step_us, copy_bytes_per_s, kernels })
    }

    /// A step without some kernels, and what it launches. What it computes means nothing if any are missing.
    fn graph_without(&mut self, plan: &Plan, omitted: &[&str]) -> Result<(Graph, Vec<Launch>), DriverError> {
        let device = self.device();
        device.omit = omitted.iter().map(|name| (*name).to_owned()).collect();
        let recorded = device.recorded(|device| device.context.capture(|| device.enqueue(plan)));
        device.omit.clear();
        recorded
    }

    /// Microseconds of a graph, the mean over descriptions of steps.
    fn time(&mut self, steps: &[Vec<u8>], graph: &Graph) -> Result<f64, DriverError> {
        let device = self.device();
        let time = |step: &Vec<u8>| {
            device.context.send(device.buffers.step.address(), step)?;
            median_us(&device.context, || graph.launch())
        };
        Ok(steps.iter().map(time).sum::<Result<f64, _>>()? / steps.len() as f64)
    }
}

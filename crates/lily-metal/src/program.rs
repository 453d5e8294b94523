//! A plan on a device: its launches with kernels found and buffers in their places, ready to be encoded for any sequences.

use std::collections::HashMap;
use std::time::Duration;

use crate::LoadError;
use crate::device::{Argument, BufferId, Device, Dispatch, Encoder, KernelId, Place};
use crate::pace::{self, Pace, Slice};
use crate::plan::{Access, Binding, Contents, LANES, Launch, Plan};
use crate::state::StateMemory;

/// What a run of a program is about.
#[derive(Clone, Debug)]
pub struct Run {
    /// Of each segment.
    pub segments: Vec<Bound>,
    /// Where the residual stream goes, `[tokens, hidden]`.
    pub x: Place,
    /// Where the logits go that are wanted, `[rows, vocab]`.
    pub logits: Place,
}

/// Where the words of a segment are, and the state of its sequence.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Its tokens.
    pub tokens: Place,
    /// Where the next one is left, if logits are wanted.
    pub next: Place,
    /// Its position, which the run moves on.
    pub position: Place,
    /// The table of its pages.
    pub pages: Place,
    /// How its next token is drawn: words, changes and mask.
    pub draw: [Place; 3],
    /// Where it is said whether a logit of its last token is not finite.
    pub broken: Place,
    /// The slot of its recurrent state.
    pub slot: u32,
}

/// What all programs share: the same whatever the step.
pub struct Shared {
    /// Weights and tables.
    pub fixed: HashMap<Contents, Place>,
    /// What launches hand on to each other, and its length.
    pub scratch: HashMap<&'static str, (BufferId, usize)>,
    /// [`crate::Options::longest_buffer`].
    pub longest_buffer: Duration,
}

/// What an argument is bound to.
#[derive(Clone, Copy, Debug)]
enum Source {
    Fixed(Argument),
    /// State of a layer of a segment's sequence, and by how much that of the next slot lies behind.
    State(usize, Place, usize),
    /// Of a segment.
    Tokens(usize),
    Next(usize),
    Position(usize),
    Pages(usize),
    /// Of a segment, one of [`Bound::draw`].
    Draw(usize, usize),
    Broken(usize),
    /// At so many bytes.
    X(usize),
    Logits(usize),
}

struct Command {
    kernel: KernelId,
    grid: [usize; 3],
    threads: usize,
    threadgroup_memory: Vec<usize>,
    sources: Vec<Source>,
    barrier: bool,
}

/// The launches of a step.
pub struct Program {
    commands: Vec<Command>,
    /// Of each command.
    paces: Vec<Pace>,
    longest_buffer: Duration,
    /// Kept from run to run, lest each allocate.
    arguments: Vec<Argument>,
}

impl Program {
    /// Finds everything that a plan needs.
    pub fn new(
        device: &dyn Device,
        plan: &Plan,
        shared: &Shared,
        state: &StateMemory,
    ) -> Result<Self, LoadError> {
        let mut commands = Vec::with_capacity(plan.launches.len());
        let mut stage = 0;
        for launch in &plan.launches {
            let source = |b: &Binding| {
                let contents = &plan.buffers[b.buffer].contents;
                let missing = || LoadError::Missing { contents: contents.name() };
                source(contents, plan.buffers[b.buffer].segment, b, shared, state).ok_or_else(missing)
            };
            commands.push(Command {
                kernel: kernel(device, launch)?,
                grid: launch.grid,
                threads: launch.threads,
                threadgroup_memory: launch.threadgroup_memory.clone(),
                sources: launch.bindings.iter().map(source).collect::<Result<_, _>>()?,
                barrier: launch.stage != stage,
            });
            stage = launch.stage;
        }
        let (paces, longest_buffer) = (plan.paces(), shared.longest_buffer);
        Ok(Self { commands, paces, longest_buffer, arguments: Vec::new() })
    }

    /// What of it is submitted together, by the positions of the segments' sequences.
    pub fn command_buffers(&self, positions: &[usize]) -> Vec<Vec<Slice>> {
        pace::command_buffers(&self.paces, positions, self.longest_buffer)
    }

    /// Encodes a command buffer of a run.
    pub fn encode(&mut self, encoder: &mut dyn Encoder, run: &Run, slices: &[Slice]) {
        for slice in slices {
            let command = &self.commands[slice.launch];
            self.arguments.clear();
            self.arguments.extend(command.sources.iter().map(|source| run.argument(source)));
            let (mut grid, mut barrier) = (command.grid, command.barrier);
            if let Some(groups) = &slice.groups {
                grid[2] = groups.len();
                barrier &= groups.start == 0;
                self.arguments.iter_mut().for_each(|argument| argument.set_last(groups.start as u32));
            }
            encoder.dispatch(&Dispatch {
                kernel: command.kernel,
                grid,
                threads: command.threads,
                threadgroup_memory: &command.threadgroup_memory,
                arguments: &self.arguments,
                barrier,
            });
        }
    }
}

impl Run {
    fn argument(&self, source: &Source) -> Argument {
        Argument::Place(match *source {
            Source::Fixed(argument) => return argument,
            Source::State(segment, at, stride) => at.after(self.segments[segment].slot as usize * stride),
            Source::Tokens(segment) => self.segments[segment].tokens,
            Source::Next(segment) => self.segments[segment].next,
            Source::Position(segment) => self.segments[segment].position,
            Source::Pages(segment) => self.segments[segment].pages,
            Source::Draw(segment, part) => self.segments[segment].draw[part],
            Source::Broken(segment) => self.segments[segment].broken,
            Source::X(offset) => self.x.after(offset),
            Source::Logits(offset) => self.logits.after(offset),
        })
    }
}

/// What an argument is bound to; `None`: nobody has it, or not enough of it.
fn source(
    contents: &Contents,
    segment: usize,
    binding: &Binding,
    shared: &Shared,
    state: &StateMemory,
) -> Option<Source> {
    let fixed = |place: Place| Source::Fixed(Argument::Place(place.after(binding.offset)));
    Some(match contents {
        Contents::Absent(_) => Source::Fixed(Argument::words(&[0])?),
        Contents::Numbers(words) => Source::Fixed(Argument::words(words)?),
        Contents::Token if binding.access == Access::Read => Source::Tokens(segment),
        Contents::Token => Source::Next(segment),
        Contents::Position => Source::Position(segment),
        Contents::Pages => Source::Pages(segment),
        Contents::Draw => Source::Draw(segment, 0),
        Contents::Changes => Source::Draw(segment, 1),
        Contents::Mask => Source::Draw(segment, 2),
        Contents::Broken => Source::Broken(segment),
        Contents::Logits => Source::Logits(binding.offset),
        Contents::Scratch("x") => Source::X(binding.offset),
        Contents::Scratch(name) => {
            let &(buffer, bytes) = shared.scratch.get(name)?;
            let fits = binding.range().end <= bytes;
            fits.then(|| fixed(Place { buffer, offset: 0 }))?
        }
        Contents::State(layer, what) => {
            let (at, stride) = state.place(*layer, *what)?;
            Source::State(segment, at, stride)
        }
        _ => fixed(*shared.fixed.get(contents)?),
    })
}

/// The compiled kernel of a launch, if the device can run it as planned.
pub fn kernel(device: &dyn Device, launch: &Launch) -> Result<KernelId, LoadError> {
    let name = launch.kernel;
    let (kernel, pipeline) = device.kernel(name).ok_or(LoadError::NoKernel { name })?;
    let refuse = |what, expected, found| Err(LoadError::Kernel { name, what, expected, found });
    if pipeline.lanes != LANES {
        return refuse("threads of a SIMD-group", LANES, pipeline.lanes);
    }
    if pipeline.max_threads < launch.threads {
        return refuse("threads of a threadgroup", launch.threads, pipeline.max_threads);
    }
    Ok(kernel)
}

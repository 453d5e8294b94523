//! A plan on a device: its launches with kernels found and buffers in their places, ready to be encoded for any sequence.

use std::collections::HashMap;

use crate::LoadError;
use crate::device::{Device, Dispatch, Encoder, KernelId, Place};
use crate::plan::{Access, Contents, LANES, Launch, Plan};
use crate::state::StateMemory;

/// What a run of the program is about: one token of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Where the token is read.
    pub token: Place,
    /// Where the next one is left.
    pub next: Place,
    /// Where its position is; the run adds one.
    pub position: Place,
    /// The table of the sequence's pages.
    pub pages: Place,
    /// The slot of its recurrent state.
    pub slot: u32,
    /// Where the residual stream goes.
    pub x: Place,
    /// Where it is said whether a logit is not finite.
    pub broken: Place,
    /// Where the logits go; `None`: none are computed, and no next token.
    pub logits: Option<Place>,
}

/// What an argument is bound to.
#[derive(Clone, Copy, Debug)]
enum Bound {
    Fixed(Place),
    /// State of a layer, and by how much that of the next slot lies behind.
    State(Place, usize),
    Token,
    Next,
    Position,
    Pages,
    X,
    Broken,
    Logits,
}

struct Command {
    kernel: KernelId,
    grid: [usize; 3],
    threads: usize,
    threadgroup_memory: Vec<usize>,
    bound: Vec<Bound>,
    barrier: bool,
}

/// The launches of a step.
pub struct Program {
    commands: Vec<Command>,
    /// How many come before the logits.
    body: usize,
    /// Kept from run to run, lest each allocate.
    places: Vec<Place>,
}

impl Program {
    /// `fixed`: places of weights, scratch and tables, by the plan's buffers.
    pub fn new(
        device: &dyn Device,
        plan: &Plan,
        fixed: &HashMap<usize, Place>,
        state: &StateMemory,
    ) -> Result<Self, LoadError> {
        let mut commands = Vec::new();
        let mut stage = 0;
        for launch in &plan.launches {
            let bound = launch.bindings.iter().map(|b| {
                let contents = &plan.buffers[b.buffer].contents;
                let missing = || LoadError::Missing { contents: contents.name() };
                fixed
                    .get(&b.buffer)
                    .map(|&place| Bound::Fixed(place))
                    .or_else(|| bound(contents, b.access, state))
                    .ok_or_else(missing)
            });
            commands.push(Command {
                kernel: kernel(device, launch)?,
                grid: launch.grid,
                threads: launch.threads,
                threadgroup_memory: launch.threadgroup_memory.clone(),
                bound: bound.collect::<Result<_, _>>()?,
                barrier: launch.stage != stage,
            });
            stage = launch.stage;
        }
        let is_head =
            |l: &Launch| l.bindings.iter().any(|b| plan.buffers[b.buffer].contents == Contents::Logits);
        let body = plan.launches.iter().position(is_head).unwrap_or(commands.len());
        Ok(Self { commands, body, places: Vec::new() })
    }

    /// Encodes a run.
    pub fn encode(&mut self, encoder: &mut dyn Encoder, run: &Run) {
        let count = if run.logits.is_some() { self.commands.len() } else { self.body };
        for command in &self.commands[..count] {
            self.places.clear();
            self.places.extend(command.bound.iter().map(|bound| match *bound {
                Bound::Fixed(place) => place,
                Bound::State(place, stride) => place.after(run.slot as usize * stride),
                Bound::Token => run.token,
                Bound::Next => run.next,
                Bound::Position => run.position,
                Bound::Pages => run.pages,
                Bound::X => run.x,
                Bound::Broken => run.broken,
                // A run without logits has no command that is bound to them.
                Bound::Logits => run.logits.unwrap_or(run.x),
            }));
            encoder.dispatch(&Dispatch {
                kernel: command.kernel,
                grid: command.grid,
                threads: command.threads,
                threadgroup_memory: &command.threadgroup_memory,
                places: &self.places,
                barrier: command.barrier,
            });
        }
    }
}

/// What an argument is bound to that differs from run to run.
fn bound(contents: &Contents, access: Access, state: &StateMemory) -> Option<Bound> {
    Some(match contents {
        Contents::Token if access == Access::Read => Bound::Token,
        Contents::Token => Bound::Next,
        Contents::Position => Bound::Position,
        Contents::Pages => Bound::Pages,
        Contents::Broken => Bound::Broken,
        Contents::Logits => Bound::Logits,
        Contents::Scratch("x") => Bound::X,
        Contents::State(layer, what) => {
            state.place(*layer, *what).map(|(at, stride)| Bound::State(at, stride))?
        }
        _ => return None,
    })
}

/// The compiled kernel of a launch, if the device can run it as planned.
fn kernel(device: &dyn Device, launch: &Launch) -> Result<KernelId, LoadError> {
    let name = launch.kernel;
    let (kernel, pipeline) = device.kernel(name).ok_or(LoadError::NoKernel { name })?;
    if pipeline.lanes != LANES {
        return Err(LoadError::Kernel {
            name,
            what: "threads of a SIMD-group",
            expected: LANES,
            found: pipeline.lanes,
        });
    }
    if pipeline.max_threads < launch.threads {
        let (expected, found) = (launch.threads, pipeline.max_threads);
        return Err(LoadError::Kernel { name, what: "threads of a threadgroup", expected, found });
    }
    Ok(kernel)
}

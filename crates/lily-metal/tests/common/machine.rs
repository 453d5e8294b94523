//! Memory for plans' buffers, and runs of their launches.

use std::collections::HashMap;

use lily_metal::plan::{Binding, Buffer, Contents, Features, Launch, Plan, Segment, State, Want};

use lily_metal::draw::Draw;
use lily_model::sample::SampleParams;

use super::model::Model;
use super::{Bound, Guard, Kernels, Memory, Order, Shape};

/// Kernels, weights and sequences of a model.
pub struct Machine<'m> {
    pub model: &'m Model,
    pub kernels: &'static Kernels,
    pub features: Features,
    pub order: Order,
    /// Draws that were checked.
    pub draws: usize,
    guard: Guard,
    weights: HashMap<Contents, Memory>,
    sequences: Vec<Sequence>,
    steps: HashMap<Vec<Segment>, Step>,
}

/// Tokens, position and state of a sequence.
struct Sequence {
    capacity: usize,
    position: usize,
    memory: HashMap<Contents, Memory>,
}

/// A planned step with the memory that is its own: NaN at first.
pub struct Step {
    pub plan: Plan,
    pub segments: Vec<Segment>,
    own: HashMap<Contents, Memory>,
    /// The sequences of its segments.
    sequences: Vec<usize>,
}

/// Tokens for a sequence, and what is wanted of them.
pub struct Feed<'t>(pub usize, pub &'t [u32], pub Want);

impl<'m> Machine<'m> {
    pub fn new(model: &'m Model, kernels: &'static Kernels, features: Features, guard: Guard) -> Self {
        let (weights, steps) = (HashMap::new(), HashMap::new());
        Self {
            model,
            kernels,
            features,
            order: Order::Forward,
            draws: 0,
            guard,
            weights,
            sequences: Vec::new(),
            steps,
        }
    }

    /// Adds a sequence.
    pub fn sequence(&mut self, capacity: usize) -> usize {
        self.sequences.push(Sequence { capacity, position: 0, memory: HashMap::new() });
        self.sequences.len() - 1
    }

    /// Lets a sequence begin anew, at a position.
    pub fn clear(&mut self, sequence: usize, position: usize) {
        let sequence = &mut self.sequences[sequence];
        sequence.memory.clear();
        sequence.position = position;
    }

    pub fn position(&self, sequence: usize) -> usize {
        self.sequences[sequence].position
    }

    /// Plans a step of sequences: how many tokens of each, and what is wanted.
    pub fn step(&mut self, feeds: &[(usize, usize, Want)]) -> Step {
        let segments: Vec<Segment> = feeds
            .iter()
            .map(|&(s, tokens, want)| Segment { tokens, capacity: self.sequences[s].capacity, want })
            .collect();
        let mut step = self.steps.remove(&segments).unwrap_or_else(|| {
            let plan = lily_metal::plan_step(&self.model.config, self.features, &segments).unwrap();
            Step { plan, segments, own: HashMap::new(), sequences: Vec::new() }
        });
        step.sequences = feeds.iter().map(|&(s, ..)| s).collect();
        step
    }

    /// The memory of a buffer.
    pub fn memory<'a>(&'a mut self, step: &'a mut Step, buffer: usize) -> &'a mut Memory {
        let Buffer { contents, bytes, segment } = step.plan.buffers[buffer].clone();
        let (kernels, guard, model) = (self.kernels, self.guard, self.model);
        let position = step.sequences.get(segment).map_or(0, |&s| self.sequences[s].position as u32);
        let home = self.home(step, buffer);
        let new = || kernels.allocate(bytes, guard);
        let memory = home.entry(contents).or_insert_with_key(|contents| match contents {
            // State is all zeros at first; positions and logs that weren't written must not be read.
            Contents::Scratch(_)
            | Contents::Logits
            | Contents::Changes
            | Contents::Mask
            | Contents::State(_, State::Log | State::Keys | State::Values) => new(),
            Contents::Draw => new().with(Draw::new(&SampleParams::greedy(), &[], false, 0).words),
            Contents::Token | Contents::Broken | Contents::State(..) => new().with(vec![0; bytes / 4]),
            Contents::Position => new().with([position]),
            Contents::Pages => new().with(0..),
            Contents::Absent(_) => new().with([0]),
            Contents::Numbers(words) => new().with(words.iter().copied()),
            _ => {
                let mut memory = new();
                memory.bytes_mut().copy_from_slice(&model.stored(contents));
                memory
            }
        });
        if memory.bytes != bytes {
            // Tokens: as many as this step reads, and the one that the last step left.
            let token = memory.words()[0];
            *memory = new().with([token]);
        }
        memory
    }

    /// Where the memory of a buffer is kept.
    fn home<'a>(&'a mut self, step: &'a mut Step, buffer: usize) -> &'a mut HashMap<Contents, Memory> {
        let Buffer { contents, segment, .. } = &step.plan.buffers[buffer];
        match contents {
            Contents::Token
            | Contents::Position
            | Contents::Pages
            | Contents::Broken
            | Contents::Draw
            | Contents::Changes
            | Contents::Mask
            | Contents::State(..) => &mut self.sequences[step.sequences[*segment]].memory,
            Contents::Absent(_) | Contents::Numbers(_) | Contents::Scratch(_) | Contents::Logits => {
                &mut step.own
            }
            _ => &mut self.weights,
        }
    }

    fn take(&mut self, step: &mut Step, buffer: usize) -> Memory {
        self.memory(step, buffer);
        let contents = step.plan.buffers[buffer].contents.clone();
        self.home(step, buffer).remove(&contents).expect("a buffer is bound twice")
    }

    /// What the bound part of a buffer holds.
    pub fn bound(&mut self, step: &mut Step, binding: &Binding) -> Vec<u8> {
        self.memory(step, binding.buffer).bytes()[binding.range()].to_vec()
    }

    /// Runs a launch, and checks that it wrote only where the plan says so.
    pub fn run(&mut self, step: &mut Step, launch: &Launch) {
        let untouched = |machine: &mut Self, step: &mut Step, binding: &Binding| {
            let written = if binding.access.writes() { binding.range() } else { 0..0 };
            let bytes = machine.memory(step, binding.buffer).bytes();
            (bytes[..written.start].to_vec(), bytes[written.end..].to_vec())
        };
        // Weights are read through pointers to const; caches are large, and looked at elsewhere.
        let watch = |b: &&Binding| {
            let contents = &step.plan.buffers[b.buffer].contents;
            matches!(contents, Contents::Scratch(_) | Contents::Logits | Contents::State(_, State::Conv))
        };
        let watched: Vec<&Binding> = launch.bindings.iter().filter(watch).collect();
        let before: Vec<_> = watched.iter().map(|b| untouched(self, step, b)).collect();
        // Out of the machine while the launch has it.
        let mut taken: Vec<Memory> = launch.bindings.iter().map(|b| self.take(step, b.buffer)).collect();
        let bound: Vec<Bound> = launch.bindings.iter().map(|b| b.offset).enumerate().collect();
        let &Launch { kernel, grid, threads, .. } = launch;
        let shape = Shape { kernel, grid, threads, memory: &launch.threadgroup_memory };
        self.kernels.launch(shape, &mut taken, &bound, self.order).unwrap();
        for (binding, memory) in launch.bindings.iter().zip(taken) {
            let contents = step.plan.buffers[binding.buffer].contents.clone();
            self.home(step, binding.buffer).insert(contents, memory);
        }
        for (binding, before) in watched.into_iter().zip(before) {
            let what = step.plan.buffers[binding.buffer].contents.clone();
            assert!(before == untouched(self, step, binding), "{kernel} writes elsewhere in {what:?}");
        }
    }

    /// Feeds tokens to sequences; gives each one's logits, row by row.
    pub fn feed(&mut self, feeds: &[Feed]) -> Vec<Vec<Vec<f32>>> {
        let shape: Vec<_> = feeds.iter().map(|Feed(s, tokens, want)| (*s, tokens.len(), *want)).collect();
        let mut step = self.step(&shape);
        for (segment, Feed(_, tokens, _)) in feeds.iter().enumerate() {
            self.of(&mut step, segment, &Contents::Token).put(tokens.iter().copied());
        }
        for launch in step.plan.launches.clone() {
            self.run(&mut step, &launch);
        }
        let mut logits = Vec::new();
        if step.plan.buffer(&Contents::Logits).is_some() {
            logits = self.of(&mut step, 0, &Contents::Logits).floats();
        }
        let mut rows = logits.chunks_exact(self.model.config.vocab_size).map(<[f32]>::to_vec);
        let mut out = Vec::new();
        for (segment, Feed(sequence, tokens, want)) in feeds.iter().enumerate() {
            self.sequences[*sequence].position += tokens.len();
            let position = self.of(&mut step, segment, &Contents::Position).words()[0];
            assert_eq!(position as usize, self.sequences[*sequence].position);
            if *want != Want::Nothing {
                assert_eq!(self.of(&mut step, segment, &Contents::Broken).words(), [0]);
            }
            out.push(rows.by_ref().take(want.rows(tokens.len())).collect());
        }
        self.keep(step);
        out
    }

    /// Takes a step back, for the next one of the same segments.
    pub fn keep(&mut self, step: Step) {
        self.steps.insert(step.segments.clone(), step);
    }

    /// The memory of a segment's buffer, or of one that all share.
    pub fn of<'a>(&'a mut self, step: &'a mut Step, segment: usize, contents: &Contents) -> &'a mut Memory {
        let at = step.plan.buffer_of(segment, contents).unwrap_or_else(|| panic!("no {contents:?}"));
        self.memory(step, at)
    }

    /// The token that a sequence's last step left.
    pub fn next(&self, sequence: usize) -> u32 {
        self.sequences[sequence].memory[&Contents::Token].words()[0]
    }
}

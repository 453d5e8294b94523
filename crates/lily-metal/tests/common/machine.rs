//! Memory for a plan's buffers, and a run of its launches.

use lily_metal::plan::{Contents, Launch, Plan, State};

use super::{Guard, Kernels, Memory, Order};

pub struct Machine {
    pub kernels: &'static Kernels,
    pub plan: Plan,
    pub memory: Vec<Memory>,
    pub order: Order,
}

impl Machine {
    /// State is all zeros; everything else that isn't put there is NaN.
    pub fn new(kernels: &'static Kernels, plan: Plan, theta: f64, rotary_dim: usize, guard: Guard) -> Self {
        let memory = plan.buffers.iter().map(|b| kernels.allocate(b.bytes, guard)).collect();
        let mut machine = Self { kernels, plan, memory, order: Order::Forward };
        machine.clear();
        let turns = lily_metal::rope::turns(theta, rotary_dim);
        let bytes: Vec<u8> = turns.iter().flat_map(|t| t.to_le_bytes()).collect();
        if let Some(at) = machine.plan.buffer(&Contents::Turns) {
            machine.memory[at].bytes_mut().copy_from_slice(&bytes);
        }
        machine.at(&Contents::Pages).put(0..);
        machine
    }

    /// Starts a sequence.
    pub fn clear(&mut self) {
        for (buffer, memory) in self.plan.buffers.iter().zip(&mut self.memory) {
            match buffer.contents {
                Contents::State(_, State::Conv | State::Recurrent) | Contents::Position => {
                    memory.bytes_mut().fill(0)
                }
                // Positions that weren't written must not be read.
                Contents::State(..) => memory.bytes_mut().fill(0xff),
                _ => {}
            }
        }
    }

    pub fn at(&mut self, contents: &Contents) -> &mut Memory {
        let at = self.plan.buffer(contents).unwrap_or_else(|| panic!("no {contents:?}"));
        &mut self.memory[at]
    }

    pub fn floats(&mut self, contents: &Contents) -> Vec<f32> {
        self.at(contents).floats()
    }

    pub fn scratch(&mut self, name: &'static str) -> Vec<f32> {
        self.floats(&Contents::Scratch(name))
    }

    pub fn run_launch(&mut self, launch: &Launch) {
        let mut memory: Vec<Option<&mut Memory>> = self.memory.iter_mut().map(Some).collect();
        let mut bound: Vec<&mut Memory> = launch
            .bindings
            .iter()
            .map(|b| memory[b.buffer].take().expect("a buffer is bound twice"))
            .collect();
        let Launch { kernel, grid, threads, threadgroup_memory, .. } = launch;
        self.kernels.launch(kernel, *grid, *threads, threadgroup_memory, &mut bound, self.order).unwrap();
    }

    /// Feeds a token; gives the logits and the token that follows.
    pub fn step(&mut self, token: u32) -> (Vec<f32>, u32) {
        self.at(&Contents::Token).put([token]);
        for launch in self.plan.launches.clone() {
            self.run_launch(&launch);
        }
        assert_eq!(self.at(&Contents::Broken).words(), [0]);
        (self.floats(&Contents::Logits), self.at(&Contents::Token).words()[0])
    }
}

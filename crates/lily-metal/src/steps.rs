//! Programs for steps of any segments: planned when such a step comes for the first time, and kept.

use std::collections::HashMap;

use lily_model::config::Config;

use crate::LoadError;
use crate::device::Device;
use crate::plan::{Contents, Features, Plan, Segment, Want, plan_step};
use crate::program::{Program, Shared};
use crate::state::StateMemory;

/// Programs that are kept. One of the real model takes about 300 kB.
const KEPT: usize = 64;

/// A kind of step: of each segment the tokens, and what is wanted.
pub type Shape = Vec<(usize, Want)>;

/// Plans steps.
pub struct Steps {
    config: Config,
    features: Features,
    /// Positions of every sequence, for the plans.
    capacity: usize,
    shared: Shared,
    programs: HashMap<Shape, Kept>,
    uses: u64,
}

struct Kept {
    program: Program,
    used: u64,
}

/// Plans a step of sequences of at most `capacity` tokens.
pub fn plan(
    config: &Config,
    features: Features,
    capacity: usize,
    shape: &[(usize, Want)],
) -> Result<Plan, LoadError> {
    let segments: Vec<Segment> =
        shape.iter().map(|&(tokens, want)| Segment { tokens, capacity, want }).collect();
    Ok(plan_step(config, features, &segments)?)
}

/// Bytes of each scratch buffer of a plan, but for the residual stream, which steps have each for themselves.
pub fn scratch(plan: &Plan) -> impl Iterator<Item = (&'static str, usize)> {
    plan.buffers.iter().filter_map(|b| match b.contents {
        Contents::Scratch("x") => None,
        Contents::Scratch(name) => Some((name, b.bytes)),
        _ => None,
    })
}

/// Steps that between them launch every kernel, and need as much scratch memory as any of one segment does, or any of `segments`
/// segments with a token each.
pub fn extremes(tokens: usize, segments: usize) -> Vec<Shape> {
    let sizes = (0..).map(|i| 1usize << i).take_while(|&n| n < tokens).chain([tokens]);
    let mut shapes: Vec<Shape> = sizes.map(|n| vec![(n, Want::Last)]).collect();
    shapes.push(vec![(tokens, Want::Nothing)]);
    shapes.push(vec![(1, Want::Nothing)]);
    shapes.push(vec![(tokens.min(segments), Want::All)]);
    shapes.push(vec![(1, Want::Last); segments]);
    shapes
}

impl Steps {
    /// None yet.
    pub fn new(config: &Config, features: Features, capacity: usize, shared: Shared) -> Self {
        Self { config: config.clone(), features, capacity, shared, programs: HashMap::new(), uses: 0 }
    }

    /// The program of a step; `None`: there is not enough scratch memory for it.
    pub fn program(
        &mut self,
        device: &dyn Device,
        state: &StateMemory,
        shape: &Shape,
    ) -> Result<Option<&mut Program>, LoadError> {
        self.uses += 1;
        if !self.programs.contains_key(shape) {
            let plan = plan(&self.config, self.features, self.capacity, shape)?;
            let room = |name| self.shared.scratch.get(name).map_or(0, |&(_, bytes)| bytes);
            if scratch(&plan).any(|(name, bytes)| bytes > room(name)) {
                return Ok(None);
            }
            let program = Program::new(device, &plan, &self.shared, state)?;
            self.forget_oldest();
            self.programs.insert(shape.clone(), Kept { program, used: 0 });
        }
        let kept = self.programs.get_mut(shape);
        Ok(kept.map(|kept| {
            kept.used = self.uses;
            &mut kept.program
        }))
    }

    fn forget_oldest(&mut self) {
        if self.programs.len() >= KEPT
            && let Some(shape) =
                self.programs.iter().min_by_key(|(_, kept)| kept.used).map(|(s, _)| s.clone())
        {
            self.programs.remove(&shape);
        }
    }
}

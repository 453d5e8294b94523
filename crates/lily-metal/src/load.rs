//! What happens once, at load: kernels are compiled, weights get their places, and all memory that steps use is made.

use std::collections::{BTreeMap, HashMap};

use lily_model::config::Config;
use lily_model::pool::{Capacity, PAGE, Pool};
use lily_model::weights::Weights;

use crate::device::{BufferId, Device, Place};
use crate::plan::{Contents, Features, Plan};
use crate::program::{self, Shared};
use crate::state::{Layout, StateMemory};
use crate::steps::{Steps, extremes, scratch};
use crate::{LoadError, Options, draw, rope, source, steps, tensor_check, weights};

/// Steps that may be enqueued before the oldest is waited for.
pub const IN_FLIGHT: usize = 2;
/// Sequences of a step, at most, and rows of logits that are kept at once.
pub const MAX_SEGMENTS: usize = 32;

/// Memory of one step in flight, which the host writes before it and reads behind it.
#[derive(Clone, Copy, Debug)]
pub struct Flight {
    /// Tokens, positions, and page tables.
    inputs: BufferId,
    /// Of each segment how its next token is drawn: words, changes, mask.
    draws: [BufferId; 3],
    /// Of each segment: the token that was drawn, and whether a logit is not finite.
    results: BufferId,
    /// f32 `[MAX_SEGMENTS, vocab]`.
    logits: BufferId,
    /// The residual stream behind the last layer, f32 `[tokens, hidden]`.
    x: BufferId,
    rows: usize,
    pages: usize,
    vocab: usize,
    hidden: usize,
}

/// Bytes of each part of a draw, of a segment of a sequence of `pages` pages.
fn draw_bytes(vocab: usize, pages: usize) -> [usize; 3] {
    let changes = draw::most_changes(vocab, pages * PAGE) * draw::CHANGE_WORDS;
    [draw::WORDS, changes, draw::mask_words(vocab)].map(|words| 4 * words)
}

impl Flight {
    fn new(device: &mut dyn Device, config: &Config, rows: usize, pages: usize) -> Result<Self, LoadError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let results = device.allocate(8 * MAX_SEGMENTS, "results of a step")?;
        // A step whose logits are not finite leaves the token as it was, and the next may read it: it must be one.
        device.write(Place { buffer: results, offset: 0 }, &[0; 8 * MAX_SEGMENTS]);
        let [words, changes, mask] = draw_bytes(vocab, pages).map(|bytes| bytes * MAX_SEGMENTS);
        let mut draws = |bytes| device.allocate(bytes, "draws of a step");
        let draws = [draws(words)?, draws(changes)?, draws(mask)?];
        Ok(Self {
            draws,
            inputs: device.allocate(8 * rows + 4 * pages * MAX_SEGMENTS, "inputs of a step")?,
            results,
            logits: device.allocate(4 * vocab * MAX_SEGMENTS, "logits")?,
            x: device.allocate(4 * hidden * rows, "activations")?,
            rows,
            pages,
            vocab,
            hidden,
        })
    }

    /// What [`Self::new`] allocates.
    fn bytes(config: &Config, rows: usize, pages: usize) -> u64 {
        let draw: usize = draw_bytes(config.vocab_size, pages).iter().sum();
        let segment = 4 * pages + 8 + 4 * config.vocab_size + draw;
        (rows * (8 + 4 * config.hidden_size) + MAX_SEGMENTS * segment) as u64
    }

    /// The token of a row.
    pub fn token(&self, row: usize) -> Place {
        Place { buffer: self.inputs, offset: 4 * row }
    }

    /// The position of a part of a segment that begins at a row.
    pub fn position(&self, row: usize) -> Place {
        Place { buffer: self.inputs, offset: 4 * (self.rows + row) }
    }

    /// The page table of a segment.
    pub fn table(&self, segment: usize) -> Place {
        Place { buffer: self.inputs, offset: 8 * self.rows + 4 * self.pages * segment }
    }

    /// How the token that follows a segment is drawn: words, changes and mask.
    pub fn draw(&self, segment: usize) -> [Place; 3] {
        let bytes = draw_bytes(self.vocab, self.pages);
        std::array::from_fn(|part| Place { buffer: self.draws[part], offset: segment * bytes[part] })
    }

    /// The token that follows a segment.
    pub fn next(&self, segment: usize) -> Place {
        Place { buffer: self.results, offset: 8 * segment }
    }

    /// Whether a logit of a segment's last token is not finite.
    pub fn broken(&self, segment: usize) -> Place {
        self.next(segment).after(4)
    }

    /// A row of logits.
    pub fn logits(&self, row: usize) -> Place {
        Place { buffer: self.logits, offset: 4 * self.vocab * row }
    }

    /// A row of the residual stream.
    pub fn x(&self, row: usize) -> Place {
        Place { buffer: self.x, offset: 4 * self.hidden * row }
    }
}

/// A model on a device, ready for steps.
pub struct Loaded {
    /// Which kernels they are made of.
    pub features: Features,
    /// Programs.
    pub steps: Steps,
    /// State of sequences.
    pub state: StateMemory,
    /// Which of it is taken.
    pub pool: Pool,
    /// Of steps in flight.
    pub flights: [Flight; IN_FLIGHT],
}

/// What memory is for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Weights, and what steps need besides state.
    pub fixed: u64,
    /// State of all sequences at full length.
    pub sequences: u64,
    /// Snapshots.
    pub snapshots: u64,
}

/// Divides a device's memory: sequences must fit, snapshots get what is left, at most what is asked for.
pub fn budget(device: &str, memory: u64, asked: Budget) -> Result<Budget, LoadError> {
    let needed = asked.fixed + asked.sequences;
    if needed > memory {
        let device = device.to_owned();
        return Err(LoadError::Memory {
            device,
            available: memory,
            weights: asked.fixed,
            state: asked.sequences,
        });
    }
    let snapshots = asked.snapshots.min(memory - needed);
    if snapshots < asked.snapshots {
        tracing::warn!(
            "{device} has {memory} bytes for Metal: the prefix cache gets {snapshots} of them instead of {}",
            asked.snapshots
        );
    }
    Ok(Budget { snapshots, ..asked })
}

/// Loads a model.
pub fn load(
    device: &mut dyn Device,
    config: &Config,
    weights: &Weights,
    options: &Options,
) -> Result<Loaded, LoadError> {
    let length = (options.context as usize).next_multiple_of(PAGE);
    let (rows, pages) = (options.max_batch_tokens as usize, length / PAGE);
    let shapes = extremes(rows.min(length), MAX_SEGMENTS.min(rows));
    let (features, plans) = compile(device, config, options, |features| {
        shapes.iter().map(|shape| steps::plan(config, features, length, shape)).collect()
    })?;
    let Some(plan) = plans.first() else { return Err(LoadError::Missing { contents: "a step".to_owned() }) };
    let layout = Layout::new(plan, length);
    let scratch_sizes = scratch_sizes(&plans);
    let weight_bytes =
        plan.buffers.iter().filter(|b| b.contents.is_weight()).map(|b| b.bytes as u64).sum::<u64>();
    let scratch_bytes = scratch_sizes.values().map(|&bytes| bytes as u64).sum::<u64>();
    let sequences = options.max_sequences as usize;
    let asked = Budget {
        fixed: weight_bytes + scratch_bytes + IN_FLIGHT as u64 * Flight::bytes(config, rows, pages),
        sequences: layout.sizes.bytes(sequences, sequences * pages),
        snapshots: options.snapshot_bytes,
    };
    let info = device.info().clone();
    let granted = budget(&info.name, info.memory, asked)?;
    let placed = weights::place(device, weights, plan, options.aligned_copies)?;
    if options.residency {
        device.keep_resident(&placed.buffers)?;
    }
    let longest_buffer = options.longest_buffer;
    let mut shared = Shared { fixed: placed.places, scratch: HashMap::new(), longest_buffer };
    for (name, bytes) in scratch_sizes {
        shared.scratch.insert(name, (device.allocate(bytes, "activations")?, bytes));
    }
    shared.fixed.insert(Contents::Turns, turns(device, config)?);
    let capacity = Capacity::new(&layout.sizes, length, sequences, granted.snapshots);
    let state = StateMemory::new(device, layout, capacity.slots, capacity.pages)?;
    let mut flight = || Flight::new(device, config, rows, pages);
    let flights = [flight()?, flight()?];
    tracing::info!("{}: matrices of many rows are multiplied by {}", info.name, features.path());
    tracing::info!(
        "{}: {} bytes of weights in their files, {} copied, {} for steps, {} for state, of {}",
        info.name,
        placed.mapped,
        placed.copied,
        asked.fixed - weight_bytes,
        granted.sequences + granted.snapshots,
        info.memory
    );
    let mut steps = Steps::new(config, features, length, shared);
    for shape in &shapes {
        // A kernel that the device can't run shows now.
        steps.program(device, &state, shape)?;
    }
    Ok(Loaded { features, steps, state, pool: Pool::new(capacity), flights })
}

/// Compiles the kernels of a model's plans: with tensor operations, if the device has units for them and computes what it should,
/// else those that every device can run.
fn compile(
    device: &mut dyn Device,
    config: &Config,
    options: &Options,
    plans: impl Fn(Features) -> Result<Vec<Plan>, LoadError>,
) -> Result<(Features, Vec<Plan>), LoadError> {
    let compile = |device: &mut dyn Device, features: Features, plans: &[Plan]| {
        device.compile(&source::source(config, features), features.into(), &kernels(plans))
    };
    if options.tensor && device.info().tensor {
        let features = Features { kv: options.kv, tensor: true };
        let plans = plans(features)?;
        let problem = compile(device, features, &plans).map_err(|e| e.to_string()).and_then(|()| {
            let mut launches = plans.iter().flat_map(|plan| &plan.launches);
            launches
                .try_for_each(|launch| program::kernel(device, launch).map(|_| ()))
                .map_err(|e| e.to_string())?;
            tensor_check::check(device, config, &plans)
        });
        match problem {
            Ok(()) => return Ok((features, plans)),
            Err(why) => tracing::warn!(
                "{}: its tensor operations are not used, so prompts are read more slowly: {why}; please report it with `lily doctor --metal-selftest` (--metal-no-tensor does without them and this message)",
                device.info().name
            ),
        }
    }
    let features = Features::from(options.kv);
    let plans = plans(features)?;
    compile(device, features, &plans)?;
    Ok((features, plans))
}

/// The largest that any of these plans needs of each scratch buffer.
fn scratch_sizes(plans: &[Plan]) -> BTreeMap<&'static str, usize> {
    let mut sizes = BTreeMap::new();
    for (name, bytes) in plans.iter().flat_map(scratch) {
        let size = sizes.entry(name).or_insert(bytes);
        *size = bytes.max(*size);
    }
    sizes
}

/// Names of the kernels that plans launch.
pub fn kernels(plans: &[Plan]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = plans.iter().flat_map(|p| &p.launches).map(|l| l.kernel).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The table of rotary angles.
pub fn turns(device: &mut dyn Device, config: &Config) -> Result<Place, LoadError> {
    let turns = rope::turns(config.attention.rope_theta, config.attention.rotary_dim);
    let bytes: Vec<u8> = turns.iter().flat_map(|t| t.to_le_bytes()).collect();
    let at = Place { buffer: device.allocate(bytes.len(), "rotary angles")?, offset: 0 };
    device.write(at, &bytes);
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_must_fit_and_snapshots_get_what_is_left() {
        let asked = Budget { fixed: 60, sequences: 30, snapshots: 20 };
        assert_eq!(budget("it", 200, asked).unwrap(), asked);
        assert_eq!(budget("it", 100, asked).unwrap(), Budget { snapshots: 10, ..asked });
        assert_eq!(budget("it", 90, asked).unwrap().snapshots, 0);
        let e = budget("it", 89, asked).unwrap_err().to_string();
        assert!(e.contains("it has 89 bytes") && e.contains("60") && e.contains("30"), "{e}");
    }
}

//! How a [`Device`] comes about, and what a step launches on it.

use std::cell::RefCell;
use std::sync::Arc;

use lily_model::config::Config;
use lily_model::pool::{Capacity, PAGE};
use lily_model::weights::Weights;

use crate::buffers::Buffers;
use crate::driver::{Args, Context, DriverError, Shape, Traffic};
use crate::forward::{Device, flash_rows_shared, flash_shared};
use crate::group::{self, Group};
use crate::kernels::Kernels;
use crate::state::{self, State};
use crate::step::{Layout, Plan};
use crate::token::Token;
use crate::weights::{DeviceWeights, Random};
use crate::{LoadError, Options, check_shapes, chunk, cluster, gdn, wide};

/// Where weights come from.
pub(crate) enum Source<'a> {
    /// A checkpoint.
    Checkpoint(&'a Weights),
    /// A seed.
    Random(u32),
}

/// A kernel that a step launches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub name: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Which of the step's dependent stages it begins, from 1. Each kernel waits for the results of the one before it in the
    /// stream, so each has at least one of its own.
    pub stage: u32,
    /// How many those are.
    pub stages: u32,
    /// What it moves.
    pub traffic: Traffic,
}

/// A list of launches in the making.
pub type Record = RefCell<Vec<Launch>>;

/// Notes a launch.
pub(crate) fn note(record: &Record, name: &'static str, shape: Shape, args: &Args) {
    let Shape { grid, threads, shared, .. } = shape;
    let mut record = record.borrow_mut();
    let (stage, stages) = (stages(&record) + 1, args.stage_count());
    record.push(Launch { name, grid, threads, shared, stage, stages, traffic: args.traffic() });
}

impl Device {
    /// Compiles the kernels for the model, brings its weights to the device and makes all buffers.
    pub(crate) fn load(
        context: Arc<Context>,
        config: Config,
        source: &Source<'_>,
        options: &Options,
    ) -> Result<Self, LoadError> {
        check_shapes(&config)?;
        let (needed, available) = (flash_shared(&config), context.shared_memory);
        if needed > available {
            let (head_dim, device) = (config.attention.head_dim, context.name.clone());
            return Err(LoadError::SharedMemory { head_dim, needed, device, available });
        }
        let kernels = if context.is_stand_in() {
            Kernels::names()
        } else {
            let mut shared = vec![("flash", needed)];
            let rows = flash_rows_shared(&config);
            shared.extend((rows <= available).then_some(("flash_rows", rows)));
            shared.push(("token", context.shared_memory));
            shared.extend(gdn::shared(&config.gdn, &context));
            shared.extend(group::shared(&context, &config));
            shared.extend(cluster::shared(&context));
            shared.extend(wide::shared(&context));
            shared.extend(chunk::shared(&context));
            Kernels::load(&context, &config, options.cache.as_deref(), &shared)?
        };
        let weights = match source {
            Source::Checkpoint(weights) => DeviceWeights::upload(&context, &config, weights)?,
            Source::Random(seed) => {
                Random { context: &context, kernels: &kernels, config: &config, seed: *seed }.weights()?
            }
        };
        let layout =
            Layout { rows: options.max_batch_tokens as usize, mask_words: config.vocab_size.div_ceil(32) };
        let length = (options.context as usize).next_multiple_of(PAGE);
        let state_sizes = state::Sizes::new(&config, length);
        let sequences = options.max_sequences as usize;
        let capacity = Capacity::new(&state_sizes.parts(), length, sequences, options.snapshot_bytes);
        let state = State::new(&context, state_sizes, length, capacity)?;
        let buffers = Buffers::new(&context, &config, &layout, length)?;
        let group = if options.fast_decode { Group::new(&context, &kernels, &config)? } else { None };
        let clusters = if options.fast_decode { cluster::Clusters::new(&context, &kernels)? } else { None };
        let wide = if options.fast_decode { wide::Wide::new(&context, &kernels)? } else { None };
        let chunk = chunk::Chunk::new(&context).filter(|_| options.fast_decode);
        let mut device = Self {
            group,
            clusters,
            wide,
            chunk,
            token: None,
            context,
            config,
            kernels,
            weights,
            buffers,
            state,
            layout,
            record: None,
            omit: Vec::new(),
        };
        device.rotary_table(length)?;
        if options.fast_decode {
            device.token = Token::new(&device)?;
        }
        Ok(device)
    }

    /// Enqueues the kernels of a step whose description is on its way to [`Buffers::step`].
    pub(crate) fn enqueue(&self, plan: &Plan) -> Result<(), DriverError> {
        match &self.token {
            Some(token) if plan.rows == 1 => token.step(self),
            _ => self.step(plan),
        }
    }

    /// Gives what `enqueue` launches by way of this device.
    pub(crate) fn recorded<T>(
        &mut self,
        enqueue: impl FnOnce(&Self) -> Result<T, DriverError>,
    ) -> Result<(T, Vec<Launch>), DriverError> {
        self.record = Some(Record::default());
        let result = enqueue(self);
        let record = self.record.take().unwrap_or_default();
        Ok((result?, record.into_inner()))
    }
}

/// What a step launches in which each of `batch` sequences decodes a token, on a device like that of `context`.
pub fn decode_launches(config: Config, context: &Context, batch: usize) -> Result<Vec<Launch>, LoadError> {
    launches(config, context, &Plan::decoding(batch))
}

/// What a step launches that reads `tokens` tokens of one prompt.
pub fn chunk_launches(config: Config, context: &Context, tokens: usize) -> Result<Vec<Launch>, LoadError> {
    launches(config, context, &Plan::reading(tokens))
}

/// The code that enqueues a step runs on a stand-in for the device of `context`.
fn launches(config: Config, context: &Context, plan: &Plan) -> Result<Vec<Launch>, LoadError> {
    let (max_sequences, max_batch_tokens) = (plan.segments as u32, plan.rows as u32);
    let options = Options { max_sequences, max_batch_tokens, ..Options::default() };
    let mut device = Device::load(context.as_stand_in(), config, &Source::Random(0), &options)?;
    let ((), launches) = device.recorded(|device| device.enqueue(plan))?;
    Ok(launches)
}

/// Dependent stages of launches that follow each other.
pub fn stages(launches: &[Launch]) -> u32 {
    launches.iter().map(|launch| launch.stages).sum()
}

/// What launches move together.
pub fn traffic(launches: &[Launch]) -> Traffic {
    let sum = |of: fn(&Traffic) -> u64| launches.iter().map(|launch| of(&launch.traffic)).sum();
    Traffic { bytes: sum(|t| t.bytes), bytes_per_position: sum(|t| t.bytes_per_position) }
}

#[cfg(test)]
mod tests {
    use lily_model::config::{Config, LayerKind};
    use lily_model::footprint::Footprint;
    use lily_model::presets::CONFIG_35B_A3B;

    use super::*;

    fn decoding(batch: usize) -> (Config, Vec<Launch>) {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let launches = decode_launches(config.clone(), &Context::h200(), batch).unwrap();
        (config, launches)
    }

    #[test]
    fn a_token_of_the_real_model_takes_at_most_270_kernels_and_stages() {
        let (_, launches) = decoding(1);
        assert!(launches.len() <= 270, "{}", launches.len());
        assert!((1..=270).contains(&stages(&launches)), "{}", stages(&launches));
        assert!(launches.iter().all(|launch| launch.name != "matmul_q4_1x1"), "the general kernels");
    }

    /// lily-model counts what must be moved, from the shapes alone.
    #[test]
    fn a_token_moves_little_more_than_it_must() {
        for batch in [1, 8] {
            let (config, launches) = decoding(batch);
            let footprint = Footprint::new(&config);
            // Of several sequences, recurrent states are written every few tokens only.
            let written = if batch == 1 { 1.0 } else { 1.0 / (gdn::PENDING + 1) as f64 };
            let recurrent = footprint.recurrent_values as f64 * (1.0 + written);
            let state = 4.0 * batch as f64 * (recurrent + 2.0 * footprint.conv_values as f64);
            let moved = traffic(&launches);
            let ratio = moved.bytes as f64 / (footprint.read_per_step(&config, batch) + state);
            println!("batch {batch}: {} bytes, {ratio:.4} times what must be", moved.bytes);
            assert!((0.99..1.05).contains(&ratio), "{ratio}");
            assert_eq!(moved.bytes_per_position, 2 * footprint.kv_values_per_token * batch as u64);
        }
    }

    #[test]
    fn the_router_of_more_than_32_tokens_is_followed_by_a_list() {
        for batch in [2, 32, 33] {
            let (config, launches) = decoding(batch);
            let count = |name| launches.iter().filter(|launch| launch.name == name).count();
            let (layers, lists) = (config.layers.len(), if batch > 32 { config.layers.len() } else { 0 });
            let names = ["router_q8", "list_experts", "experts_group_q4", "route"];
            assert_eq!(names.map(count), [layers, lists, layers, 0], "{batch}");
        }
    }

    #[test]
    fn a_chunk_reads_all_weights_but_those_of_logits() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let layers = config.layers.len();
        let (gdn, attention) = (config.count(LayerKind::Gdn), config.count(LayerKind::Attention));
        // The second one is small for the kernels of chunks: they have the projections only.
        for (tokens, products, by_pieces, by_copies) in
            [(512, 2 * layers, layers, 0), (128, layers, 0, layers)]
        {
            let launches = chunk_launches(config.clone(), &Context::h200(), tokens).unwrap();
            let count = |name| launches.iter().filter(|launch| launch.name == name).count();
            let names =
                ["list_experts", "add_experts", "delta_chunk", "flash_rows", "finish", "bests", "gather"];
            assert_eq!(names.map(count), [layers, layers, gdn, attention, 1, 0, 0]);
            let experts = ["chunk_gather", "chunk_gate_up_q4", "chunk_columns", "chunk_down_q4"];
            assert_eq!(experts.map(count), [by_pieces; 4]);
            assert_eq!(["chunk_q4", "experts_group_q4"].map(count), [products, by_copies]);
            let footprint = Footprint::new(&config);
            let head = (config.hidden_size * config.vocab_size) as f64 * 4.5 / 8.0;
            let state = 2.0 * 4.0 * (footprint.recurrent_values + footprint.conv_values) as f64;
            let moved = traffic(&launches);
            let ratio = moved.bytes as f64 / (footprint.read_per_step(&config, tokens) + state - head);
            println!("{} bytes, {ratio:.4} times what must be", moved.bytes);
            assert!((0.99..1.05).contains(&ratio), "{ratio}");
            // Eight rows read K/V together.
            assert_eq!(moved.bytes_per_position, tokens as u64 / 8 * 2 * footprint.kv_values_per_token);
        }
    }

    #[test]
    fn the_delta_rule_of_many_rows_has_kernels_of_its_own() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let layers = config.count(LayerKind::Gdn);
        for (tokens, delta_1, others) in [(gdn::CHUNK_ROWS - 1, layers, 0), (gdn::CHUNK_ROWS, 0, layers)] {
            let launches = chunk_launches(config.clone(), &Context::h200(), tokens).unwrap();
            let count = |name| launches.iter().filter(|launch| launch.name == name).count();
            // Those leave columns for the next product.
            let names =
                ["delta_1", "columns_heads", "delta_inputs", "delta_chunk", "delta_outputs", "delta_4"];
            assert_eq!(names.map(count), [delta_1, delta_1, others, others, others, 0], "{tokens} tokens");
        }
    }

    #[test]
    fn a_checkpoint_in_bf16_is_decoded_by_the_general_kernels() {
        let mut config = Config::from_json(CONFIG_35B_A3B).unwrap();
        config.quantization = None;
        config.layers = vec![LayerKind::Gdn, LayerKind::Attention];
        let launches = decode_launches(config, &Context::h200(), 1).unwrap();
        assert!(launches.iter().any(|l| l.name == "gate_up_bf16"), "{launches:?}");
    }

    #[test]
    fn a_card_with_less_shared_memory_runs_the_real_model_too() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let context = Context::rtx_4090();
        for batch in [1, 8, 32] {
            let launches = decode_launches(config.clone(), &context, batch).unwrap();
            let most = launches.iter().max_by_key(|launch| launch.shared).unwrap();
            assert!(most.shared <= context.shared_memory, "{most:?}");
        }
    }

    #[test]
    fn a_kernel_may_have_stages_inside() {
        let record = Record::default();
        let shape = Shape { grid: [1, 2, 3], threads: 32, shared: 4, overlap: true };
        note(&record, "first", shape, Args::new().stages(5).moves(7).moves_per_position(2));
        note(&record, "second", shape, &Args::new());
        let launches = record.into_inner();
        assert_eq!(launches.iter().map(|l| (l.stage, l.stages)).collect::<Vec<_>>(), [(1, 5), (6, 1)]);
        assert_eq!((launches.len(), stages(&launches)), (2, 6));
        assert_eq!(traffic(&launches), Traffic { bytes: 7, bytes_per_position: 2 });
    }

    #[test]
    fn a_stand_in_gives_no_results() {
        let context = Context::h200();
        let buffer = context.allocate(100, "test").unwrap();
        assert_ne!(buffer.address(), context.allocate(1, "test").unwrap().address());
        assert_eq!(buffer.read(0, &mut [0; 4]), Err(DriverError::StandIn));
        assert!(context.memory().is_err() && context.enter().is_err());
    }
}

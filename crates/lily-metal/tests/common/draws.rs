//! Draws of tokens, by the two kernels that make them from logits that are there.

use std::collections::HashSet;

use fastrand::Rng;
use lily_metal::plan::{Contents, KvType, Launch, Plan, Segment, Want};
use lily_metal::plan_step;
use lily_metal::selftest::Drawn;
use lily_model::config::Config;

use super::model::folder;
use super::{Bound, Guard, Kernels, Memory, Order, Shape};

/// Tokens that a sequence has room for.
const CAPACITY: usize = 2048;

/// Sizes of vocabularies that draws are tested with.
pub const VOCABULARIES: [usize; 4] = [20, 1028, 2000, 248_320];

/// Nano with a vocabulary of another size.
pub fn config(vocab: usize) -> Config {
    let nano = std::fs::read(folder("tests/data/nano/mlx-4bit/config.json")).unwrap();
    Config { vocab_size: vocab, ..Config::from_json(&nano).unwrap() }
}

/// `best` and `finish` with their memory.
pub struct Drawer {
    pub kernels: &'static Kernels,
    vocab: usize,
    plan: Plan,
    launches: Vec<Launch>,
    memories: Vec<Memory>,
    /// The memory of each buffer of the plan that they use.
    index: Vec<Option<usize>>,
}

/// What a draw left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    pub token: u32,
    pub broken: bool,
}

impl Drawer {
    pub fn new(config: &Config, source: &str) -> Self {
        let kernels = Kernels::compile(source);
        // One sequence alone has `lm_head` make its logits.
        let segments = [Segment { tokens: 1, capacity: CAPACITY, want: Want::Last }; 2];
        let plan = plan_step(config, KvType::F32, &segments).unwrap();
        let first = |kernel| plan.launches.iter().find(|l| l.kernel == kernel).unwrap().clone();
        let launches: Vec<Launch> = ["best", "finish"].map(first).to_vec();
        let (mut memories, mut index) = (Vec::new(), vec![None; plan.buffers.len()]);
        for binding in launches.iter().flat_map(|l| &l.bindings) {
            if index[binding.buffer].is_none() {
                index[binding.buffer] = Some(memories.len());
                memories.push(kernels.allocate(plan.buffers[binding.buffer].bytes, Guard::End));
            }
        }
        Self { kernels, vocab: config.vocab_size, plan, launches, memories, index }
    }

    fn of(&mut self, contents: &Contents) -> &mut Memory {
        let buffer = self.plan.buffer(contents).unwrap();
        &mut self.memories[self.index[buffer].unwrap()]
    }

    /// Draws a token, with NaN in all memory that is not an input.
    pub fn draw(&mut self, drawn: &Drawn, logits: &[f32], order: Order) -> Left {
        let words = drawn.draw(self.vocab);
        let owed = if drawn.owed { drawn.history.last().copied().unwrap() } else { u32::MAX };
        self.memories.iter_mut().for_each(|memory| memory.bytes_mut().fill(0xff));
        self.of(&Contents::Logits).put(logits.iter().map(|x| x.to_bits()));
        self.of(&Contents::Draw).put(words.words);
        self.of(&Contents::Changes).put(words.changes);
        self.of(&Contents::Mask).put(words.mask);
        self.of(&Contents::Token).put([owed]);
        self.of(&Contents::Position).put([7]);
        self.of(&Contents::Numbers(vec![1])).put([1]);
        for launch in &self.launches {
            let bound: Vec<Bound> =
                launch.bindings.iter().map(|b| (self.index[b.buffer].unwrap(), b.offset)).collect();
            let &Launch { kernel, grid, threads, .. } = launch;
            let shape = Shape { kernel, grid, threads, memory: &launch.threadgroup_memory };
            self.kernels.launch(shape, &mut self.memories, &bound, order).unwrap();
        }
        assert_eq!(self.of(&Contents::Position).words(), [8]);
        let token = self.of(&Contents::Token).words()[0];
        Left { token, broken: self.of(&Contents::Broken).words()[0] == 1 }
    }

    /// Draws of every kind in turn, with threads forwards, backwards, and each time otherwise by chance; each must be the sampler's.
    /// Gives the tokens.
    pub fn check(&mut self, count: usize, seed: u64) -> HashSet<u32> {
        let (vocab, mut random) = (self.vocab, Rng::with_seed(seed));
        let mut all = HashSet::new();
        for i in 0..count {
            let tokens: Vec<u32> = (0..1 + i % 2).map(|_| random.u32(0..vocab as u32)).collect();
            let drawn = Drawn::random(i, random.usize(0..60), &tokens, vocab, &mut random);
            let logits = logits(vocab, i / 8 % 2 == 1, &mut random);
            let expected = Left { token: drawn.token(&logits), broken: false };
            let order = [Order::Forward, Order::Backward, Order::Random(i as u16)][i % 3];
            let got = self.draw(&drawn, &logits, order);
            assert_eq!(got, expected, "draw {i}: {:?}", drawn.params);
            all.insert(expected.token);
        }
        all
    }
}

/// Random logits: some far above the others, as a model's are; rounded to quarters if there are to be equal ones.
pub fn logits(vocab: usize, equal: bool, random: &mut Rng) -> Vec<f32> {
    let one = |_| {
        let x = (0..6).map(|_| random.f32() - 0.5).sum::<f32>() * 5.0;
        let x = if random.u32(0..500) == 0 { x + 8.0 } else { x };
        if equal { (x * 4.0).round() / 4.0 } else { x }
    };
    (0..vocab).map(one).collect()
}

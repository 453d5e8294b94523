//! State of sequences: K/V in pages, recurrent state in slots. Both are shared between sequences and
//! snapshots by reference and copied when one of them writes.

use std::sync::Arc;

use lily_model::config::{Config, LayerKind};

use crate::simd::WIDTH;

/// Tokens of a page.
pub const PAGE: usize = 64;

/// State of one sequence at one position.
#[derive(Clone)]
pub struct Sequence {
    /// Every token fed so far.
    pub tokens: Vec<u32>,
    /// The token that the last step sampled, not yet fed.
    pub sampled: Option<u32>,
    /// Most tokens that memory is reserved for.
    pub capacity: usize,
    /// State per layer.
    pub layers: Vec<LayerState>,
}

/// State of one layer.
#[derive(Clone)]
pub enum LayerState {
    /// Gated DeltaNet.
    Gdn(Arc<Recurrent>),
    /// Attention: a page for every [`PAGE`] tokens of the capacity.
    Attention(Vec<Arc<Page>>),
}

/// State of a Gated DeltaNet layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrent {
    /// The last `taps - 1` inputs of the convolution, oldest first, `[taps - 1, channels]`.
    pub conv: Vec<f32>,
    /// Per value head `[key_dim, value_dim]`, cut into pieces of [`crate::gdn::COLUMNS`] columns, the last maybe fewer, each
    /// row-major, one behind the other.
    pub state: Vec<f32>,
}

/// Keys and values of [`PAGE`] consecutive positions.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// Of keys; values are [`padded`].
    pub head_dim: usize,
    /// Normed and rotated, `[kv_heads, head_dim, PAGE]`: a product with a query then has positions side by side.
    pub k: Values,
    /// `[kv_heads, PAGE, padded(head_dim)]`.
    pub v: Values,
}

/// Numbers of the cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// For exact computation.
    F32(Vec<f32>),
    /// The bits of bf16.
    Bf16(Vec<u16>),
}

/// What the cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32, for exact computation.
    F32,
    /// bf16.
    Bf16,
}

/// The next multiple of a vector's lanes.
pub fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(WIDTH)
}

impl Kind {
    /// Bytes of a number.
    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    fn zeros(self, n: usize) -> Values {
        match self {
            Self::F32 => Values::F32(vec![0.0; n]),
            Self::Bf16 => Values::Bf16(vec![0; n]),
        }
    }
}

impl Values {
    /// Writes `x` at every `stride`-th place from `first` on, rounding to nearest.
    fn put(&mut self, first: usize, stride: usize, x: &[f32]) {
        match self {
            Self::F32(to) => to[first..].iter_mut().step_by(stride).zip(x).for_each(|(to, x)| *to = *x),
            Self::Bf16(to) => {
                let bits = |x: f32| half::bf16::from_f32(x).to_bits();
                to[first..].iter_mut().step_by(stride).zip(x).for_each(|(to, x)| *to = bits(*x));
            }
        }
    }
}

impl Page {
    fn new(config: &Config, kind: Kind) -> Self {
        let (heads, head_dim) = (config.attention.kv_heads, config.attention.head_dim);
        let (k, v) = (kind.zeros(heads * head_dim * PAGE), kind.zeros(heads * PAGE * padded(head_dim)));
        Self { head_dim, k, v }
    }

    /// Stores the key and the value of one head at one position of the page.
    pub fn put(&mut self, kv_head: usize, position: usize, k: &[f32], v: &[f32]) {
        self.k.put(kv_head * self.head_dim * PAGE + position, PAGE, k);
        self.v.put((kv_head * PAGE + position) * padded(self.head_dim), 1, v);
    }
}

impl Sequence {
    /// An empty sequence with memory for `capacity` tokens.
    pub fn new(config: &Config, kind: Kind, capacity: usize) -> Self {
        let layer = |kind: &LayerKind| match kind {
            LayerKind::Gdn => LayerState::Gdn(Arc::new(Recurrent {
                conv: vec![0.0; config.gdn.conv_state_len()],
                state: vec![0.0; config.gdn.state_len()],
            })),
            LayerKind::Attention => LayerState::Attention(Vec::new()),
        };
        let layers = config.layers.iter().map(layer).collect();
        let mut sequence = Self { tokens: Vec::new(), sampled: None, capacity: 0, layers };
        sequence.grow(config, kind, capacity);
        sequence
    }

    /// Adds pages for `capacity` tokens in all.
    pub fn grow(&mut self, config: &Config, kind: Kind, capacity: usize) {
        self.capacity = capacity;
        for layer in &mut self.layers {
            if let LayerState::Attention(pages) = layer {
                pages.resize_with(capacity.div_ceil(PAGE), || Arc::new(Page::new(config, kind)));
            }
        }
    }

    /// A copy that shares everything written so far, and holds nothing beyond.
    pub fn freeze(&self) -> Self {
        let mut copy = self.clone();
        copy.capacity = self.tokens.len();
        for layer in &mut copy.layers {
            if let LayerState::Attention(pages) = layer {
                pages.truncate(copy.capacity.div_ceil(PAGE));
            }
        }
        copy
    }
}

/// Bytes that a sequence of `capacity` tokens holds.
pub fn bytes(config: &Config, kind: Kind, capacity: usize) -> u64 {
    let (a, g) = (&config.attention, &config.gdn);
    let recurrent = 4 * (g.state_len() + g.conv_state_len()) * config.count(LayerKind::Gdn);
    let position = kind.size() * a.kv_heads * (a.head_dim + padded(a.head_dim));
    let page = PAGE * position * config.count(LayerKind::Attention);
    recurrent as u64 + capacity.div_ceil(PAGE) as u64 * page as u64
}

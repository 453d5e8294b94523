//! State of sequences: K/V in pages, recurrent state in slots. Full pages are shared between sequences and
//! snapshots by reference; recurrent state too, until one of them writes. What is held is counted in a [`Ledger`]: a
//! page once, however many share it, and recurrent state for each sequence and snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lily_model::config::{Config, LayerKind};

use crate::simd::WIDTH;

/// Tokens of a page.
pub const PAGE: usize = 64;

/// Counts bytes of state.
#[derive(Clone, Default)]
pub struct Ledger(Arc<AtomicU64>);

/// Bytes that count as held while this lives. A clone counts as much again.
pub struct Charge {
    bytes: u64,
    ledger: Ledger,
}

impl Ledger {
    /// Bytes held.
    pub fn held(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn charge(&self, bytes: u64) -> Charge {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Charge { bytes, ledger: self.clone() }
    }
}

impl Clone for Charge {
    fn clone(&self) -> Self {
        self.ledger.charge(self.bytes)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

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
    /// Of the recurrent state.
    charge: Charge,
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

/// Keys and values of [`PAGE`] consecutive positions in one layer.
#[derive(Clone)]
pub struct Page {
    /// Of keys; values are [`padded`].
    pub head_dim: usize,
    /// Normed and rotated, `[kv_heads, head_dim, PAGE]`: a product with a query then has positions side by side.
    pub k: Values,
    /// `[kv_heads, PAGE, padded(head_dim)]`.
    pub v: Values,
    /// Held for its clones to be counted.
    _charge: Charge,
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
    fn new(config: &Config, kind: Kind, ledger: &Ledger) -> Self {
        let (heads, head_dim) = (config.attention.kv_heads, config.attention.head_dim);
        let (k, v) = (kind.zeros(heads * head_dim * PAGE), kind.zeros(heads * PAGE * padded(head_dim)));
        Self { head_dim, k, v, _charge: ledger.charge(Self::bytes(config, kind)) }
    }

    fn bytes(config: &Config, kind: Kind) -> u64 {
        let a = &config.attention;
        (PAGE * kind.size() * a.kv_heads * (a.head_dim + padded(a.head_dim))) as u64
    }

    /// Stores the key and the value of one head at one position of the page.
    pub fn put(&mut self, kv_head: usize, position: usize, k: &[f32], v: &[f32]) {
        self.k.put(kv_head * self.head_dim * PAGE + position, PAGE, k);
        self.v.put((kv_head * PAGE + position) * padded(self.head_dim), 1, v);
    }
}

impl Sequence {
    /// An empty sequence with memory for `capacity` tokens.
    pub fn new(config: &Config, kind: Kind, ledger: &Ledger, capacity: usize) -> Self {
        let layer = |kind: &LayerKind| match kind {
            LayerKind::Gdn => LayerState::Gdn(Arc::new(Recurrent {
                conv: vec![0.0; config.gdn.conv_state_len()],
                state: vec![0.0; config.gdn.state_len()],
            })),
            LayerKind::Attention => LayerState::Attention(Vec::new()),
        };
        let layers = config.layers.iter().map(layer).collect();
        let charge = ledger.charge(recurrent_bytes(config));
        let mut sequence = Self { tokens: Vec::new(), sampled: None, capacity: 0, layers, charge };
        sequence.grow(config, kind, capacity);
        sequence
    }

    /// Adds pages for `capacity` tokens in all. The page to be written next becomes its own.
    pub fn grow(&mut self, config: &Config, kind: Kind, capacity: usize) {
        self.capacity = capacity;
        let ledger = self.charge.ledger.clone();
        for pages in self.caches() {
            pages.resize_with(capacity.div_ceil(PAGE), || Arc::new(Page::new(config, kind, &ledger)));
        }
        self.own_last_page();
    }

    /// A copy that shares every full page, and holds nothing beyond what was written so far.
    pub fn freeze(&self) -> Self {
        let mut copy = self.clone();
        copy.capacity = self.tokens.len();
        let pages_written = copy.capacity.div_ceil(PAGE);
        copy.caches().for_each(|pages| pages.truncate(pages_written));
        copy.own_last_page();
        copy
    }

    /// Copies a page that is written in part if others hold it too: whoever goes on writes to it.
    fn own_last_page(&mut self) {
        let (page, written) = (self.tokens.len() / PAGE, self.tokens.len() % PAGE);
        if written > 0 {
            self.caches().filter_map(|pages| pages.get_mut(page)).for_each(|page| {
                Arc::make_mut(page);
            });
        }
    }

    fn caches(&mut self) -> impl Iterator<Item = &mut Vec<Arc<Page>>> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerState::Attention(pages) => Some(pages),
            LayerState::Gdn(_) => None,
        })
    }
}

/// Bytes that a sequence of `capacity` tokens holds.
pub fn bytes(config: &Config, kind: Kind, capacity: usize) -> u64 {
    bytes_beside(config, kind, capacity, 0)
}

/// Bytes that a sequence of `capacity` tokens holds beside the full pages among its first `shared` tokens.
pub fn bytes_beside(config: &Config, kind: Kind, capacity: usize, shared: usize) -> u64 {
    let pages = (capacity.div_ceil(PAGE) - shared / PAGE) * config.count(LayerKind::Attention);
    recurrent_bytes(config) + pages as u64 * Page::bytes(config, kind)
}

fn recurrent_bytes(config: &Config) -> u64 {
    let values = config.gdn.state_len() + config.gdn.conv_state_len();
    4 * (values * config.count(LayerKind::Gdn)) as u64
}

//! State of sequences: K/V in pages, recurrent state in slots. Both are shared between sequences and
//! snapshots by reference and copied when one of them writes.

use std::sync::Arc;

use lily_model::config::{Config, LayerKind};

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
    /// `[value_heads, key_dim, value_dim]`.
    pub state: Vec<f32>,
}

/// Keys and values of [`PAGE`] consecutive positions.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// Normed and rotated, `[kv_heads, PAGE, head_dim]`.
    pub k: Vec<f32>,
    /// `[kv_heads, PAGE, head_dim]`.
    pub v: Vec<f32>,
}

impl Page {
    fn new(config: &Config) -> Self {
        let n = config.attention.kv_width() * PAGE;
        Self { k: vec![0.0; n], v: vec![0.0; n] }
    }
}

impl Sequence {
    /// An empty sequence with memory for `capacity` tokens.
    pub fn new(config: &Config, capacity: usize) -> Self {
        let layer = |kind: &LayerKind| match kind {
            LayerKind::Gdn => LayerState::Gdn(Arc::new(Recurrent {
                conv: vec![0.0; config.gdn.conv_state_len()],
                state: vec![0.0; config.gdn.state_len()],
            })),
            LayerKind::Attention => LayerState::Attention(Vec::new()),
        };
        let layers = config.layers.iter().map(layer).collect();
        let mut sequence = Self { tokens: Vec::new(), sampled: None, capacity: 0, layers };
        sequence.grow(config, capacity);
        sequence
    }

    /// Adds pages for `capacity` tokens in all.
    pub fn grow(&mut self, config: &Config, capacity: usize) {
        self.capacity = capacity;
        for layer in &mut self.layers {
            if let LayerState::Attention(pages) = layer {
                pages.resize_with(capacity.div_ceil(PAGE), || Arc::new(Page::new(config)));
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
pub fn bytes(config: &Config, capacity: usize) -> u64 {
    let recurrent = (config.gdn.state_len() + config.gdn.conv_state_len()) * config.count(LayerKind::Gdn);
    let page = 2 * PAGE * config.attention.kv_width() * config.count(LayerKind::Attention);
    4 * (recurrent as u64 + capacity.div_ceil(PAGE) as u64 * page as u64)
}

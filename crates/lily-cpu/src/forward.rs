//! The order of the blocks, as the paper's figure has them.

use std::ops::Range;
use std::sync::Arc;

use lily_model::config::Config;
use lily_model::weights::{Layer, Mixer, Weights};
use rayon::prelude::*;

use crate::device::Device;
use crate::math::{rms_norm, rotary};
use crate::state::{LayerState, Page, Recurrent, Sequence};
use crate::tap::{LayerTap, Point, Tap};
use crate::{attention, embed, gdn, moe};

/// What the blocks of one step share. Activations of all segments lie one behind the other.
pub struct Step<'a> {
    /// Shapes and constants.
    pub config: &'a Config,
    /// Where to run.
    pub device: &'a Device,
    /// Tokens of each segment.
    pub rows: Vec<Rows>,
    /// Cosine and sine of the rotary angles of each token.
    pub angles: Vec<Vec<(f32, f32)>>,
}

/// Where a segment's tokens lie in the step and in their sequence.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// First token in the step.
    pub first: usize,
    /// Tokens.
    pub len: usize,
    /// Position of the first token in its sequence.
    pub start: usize,
}

impl Rows {
    /// The segment's part of an activation of `width` values a token.
    pub fn range(&self, width: usize) -> Range<usize> {
        self.first * width..(self.first + self.len) * width
    }
}

impl<'a> Step<'a> {
    /// A step of segments that start at a position and have so many tokens.
    pub fn new(config: &'a Config, device: &'a Device, segments: &[(usize, usize)]) -> Self {
        let mut rows = Vec::with_capacity(segments.len());
        let mut angles = Vec::new();
        for &(start, len) in segments {
            rows.push(Rows { first: angles.len(), len, start });
            let a = &config.attention;
            angles.extend((start..start + len).map(|p| rotary(p as u32, a.rope_theta, a.rotary_dim)));
        }
        Self { config, device, rows, angles }
    }

    /// Tokens of all segments.
    pub fn tokens(&self) -> usize {
        self.angles.len()
    }

    /// RMS norm of every token.
    pub fn norm(&self, x: &[f32], gain: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        let hidden = self.config.hidden_size;
        out.par_chunks_exact_mut(hidden)
            .zip(x.par_chunks_exact(hidden))
            .for_each(|(out, x)| rms_norm(x, gain, self.config.rms_norm_eps, out));
        out
    }
}

/// Runs all layers. `tokens` are those of all segments, `sequences` one per segment. Returns the residual
/// stream, `[tokens, hidden]`.
pub fn layers(
    step: &Step<'_>,
    w: &Weights,
    tokens: &[u32],
    sequences: &mut [Sequence],
    tap: Tap<'_>,
) -> Vec<f32> {
    let mut x = embed::forward(w, tokens);
    for (i, w) in w.layers.iter().enumerate() {
        let states = sequences.iter_mut().map(|s| &mut s.layers[i]).collect();
        layer(step, w, &mut x, states, &mut |point, values| tap(i, point, values));
    }
    x
}

fn layer(step: &Step<'_>, w: &Layer, x: &mut [f32], states: Vec<&mut LayerState>, tap: LayerTap<'_>) {
    let h = step.norm(x, &w.input_norm);
    let mixed = match &w.mixer {
        Mixer::Gdn(w) => gdn::forward(step, w, &h, states.into_iter().filter_map(recurrent).collect()),
        Mixer::Attention(w) => {
            attention::forward(step, w, &h, states.into_iter().filter_map(pages).collect())
        }
    };
    tap(Point::Mixer, &mixed);
    add(x, &mixed);
    let y = moe::forward(step, &w.moe, &step.norm(x, &w.post_attention_norm), tap);
    tap(Point::Moe, &y);
    add(x, &y);
    tap(Point::Out, x);
}

fn recurrent(state: &mut LayerState) -> Option<&mut Arc<Recurrent>> {
    if let LayerState::Gdn(state) = state { Some(state) } else { None }
}

fn pages(state: &mut LayerState) -> Option<&mut Vec<Arc<Page>>> {
    if let LayerState::Attention(pages) = state { Some(pages) } else { None }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

//! The order of the blocks, as the paper's figure has them.

use std::ops::Range;
use std::sync::Arc;

use lily_model::config::Config;
use lily_model::weights::{Layer, Mixer, Weights};

use crate::buffers::Buffer;
use crate::device::{Device, dispatch};
use crate::math::rotary;
use crate::moe::Routes;
use crate::state::{LayerState, Page, Recurrent, Sequence};
use crate::tap::{LayerTap, Point, Tap};
use crate::vector::{add, rms_norm};
use crate::{attention, embed, gdn, moe};

/// What the blocks of one step share. Activations of all segments lie one behind the other.
pub struct Step<'a> {
    /// Shapes and constants.
    pub config: &'a Config,
    /// Where to run.
    pub device: &'a Device,
    /// Tokens of each segment.
    pub rows: &'a [Rows],
    /// Cosine and sine of the rotary angles, `[tokens, rotary_dim / 2]`.
    angles: &'a [(f32, f32)],
}

/// Memory that steps share, so that a step of a size seen before allocates nothing.
#[derive(Default)]
pub struct Workspace {
    rows: Vec<Rows>,
    angles: Vec<(f32, f32)>,
    routes: Routes,
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

impl Workspace {
    /// Lays out a step of segments that start at a position and have so many tokens. What it gives beside the step
    /// is for [`layers`].
    pub fn step<'a>(
        &'a mut self,
        config: &'a Config,
        device: &'a Device,
        segments: impl Iterator<Item = (usize, usize)>,
    ) -> (Step<'a>, &'a mut Routes) {
        self.rows.clear();
        let mut first = 0;
        for (start, len) in segments {
            self.rows.push(Rows { first, len, start });
            first += len;
        }
        let a = &config.attention;
        let half = a.rotary_dim / 2;
        self.angles.resize(first * half, (0.0, 0.0));
        let positions = self.rows.iter().flat_map(|r| r.start..r.start + r.len);
        for (angles, position) in self.angles.chunks_exact_mut(half.max(1)).zip(positions) {
            rotary(position as u32, a.rope_theta, angles);
        }
        (Step { config, device, rows: &self.rows, angles: &self.angles }, &mut self.routes)
    }
}

impl<'a> Step<'a> {
    /// Tokens of all segments.
    pub fn tokens(&self) -> usize {
        self.rows.last().map_or(0, |r| r.first + r.len)
    }

    /// Cosine and sine of a token's rotary angles.
    pub fn angles(&self, token: usize) -> &[(f32, f32)] {
        let half = self.config.attention.rotary_dim / 2;
        &self.angles[token * half..][..half]
    }

    /// RMS norm of every token.
    pub fn norm(&self, x: &[f32], gain: &[f32]) -> Buffer<'a, f32> {
        let mut out = self.device.buffers.floats(x.len());
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        self.device.pool.chunks(&mut out, hidden, |token, out| {
            let x = &x[token * hidden..][..hidden];
            dispatch!(self.device.isa, rms_norm(x => x: &[f32], gain => gain: &[f32], eps => eps: f32, out => out: &mut [f32]));
        });
        out
    }

    /// `x += y`.
    fn add(&self, x: &mut [f32], y: &[f32]) {
        let hidden = self.config.hidden_size;
        self.device.pool.chunks(x, hidden, |token, x| {
            let y = &y[token * hidden..][..hidden];
            dispatch!(self.device.isa, add(x => out: &mut [f32], y => x: &[f32]));
        });
    }
}

/// Runs all layers. `tokens` are those of all segments, `sequences` one per segment. Returns the residual
/// stream, `[tokens, hidden]`.
pub fn layers<'a>(
    step: &Step<'a>,
    w: &Weights,
    tokens: &[u32],
    sequences: &mut [Sequence],
    routes: &mut Routes,
    tap: Tap<'_>,
) -> Buffer<'a, f32> {
    let mut x = embed::forward(step.device, w, tokens);
    for (i, w) in w.layers.iter().enumerate() {
        let states = sequences.iter_mut().map(|s| &mut s.layers[i]);
        layer(step, w, &mut x, states, routes, &mut |point, values| tap(i, point, values));
    }
    x
}

fn layer<'s>(
    step: &Step<'_>,
    w: &Layer,
    x: &mut [f32],
    states: impl Iterator<Item = &'s mut LayerState>,
    routes: &mut Routes,
    tap: LayerTap<'_>,
) {
    let h = step.norm(x, &w.input_norm);
    let mixed = match &w.mixer {
        Mixer::Gdn(w) => gdn::forward(step, w, &h, states.filter_map(recurrent).collect()),
        Mixer::Attention(w) => attention::forward(step, w, &h, states.filter_map(pages).collect()),
    };
    tap(Point::Mixer, &mixed);
    step.add(x, &mixed);
    let h = step.norm(x, &w.post_attention_norm);
    let y = moe::forward(step, &w.moe, &h, routes, tap);
    tap(Point::Moe, &y);
    step.add(x, &y);
    tap(Point::Out, x);
}

fn recurrent(state: &mut LayerState) -> Option<&mut Arc<Recurrent>> {
    if let LayerState::Gdn(state) = state { Some(state) } else { None }
}

fn pages(state: &mut LayerState) -> Option<&mut Vec<Arc<Page>>> {
    if let LayerState::Attention(pages) = state { Some(pages) } else { None }
}

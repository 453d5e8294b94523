//! A look inside a forward pass, for tests and tools.

/// Something computed in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// Output of the mixer, `[hidden]` per token.
    Mixer,
    /// Chosen experts by falling weight, `[experts_per_token]` per token.
    Experts,
    /// Their weights.
    ExpertWeights,
    /// Output of the mixture of experts, `[hidden]` per token.
    Moe,
    /// The residual stream behind the layer, `[hidden]` per token.
    Out,
}

/// Receives layer, point and values.
pub type Tap<'a> = &'a mut (dyn FnMut(usize, Point, &[f32]) + Send);

/// As [`Tap`], within one layer.
pub(crate) type LayerTap<'a> = &'a mut (dyn FnMut(Point, &[f32]) + Send);

/// Looks at nothing.
pub fn no_tap(_: usize, _: Point, _: &[f32]) {}

//! Matrices as the files hold them: affine codes or plain floats, never expanded as a whole.

use std::ops::Range;

use crate::config::Affine;
use crate::files::Bytes;

/// A matrix `[rows, cols]`, used as `y = W x`. Clones share the bytes.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// How the values are stored.
    pub form: Form,
}

/// Storage of a matrix.
#[derive(Clone, Debug)]
pub enum Form {
    /// Codes with a scale and a bias per group: `value = scale * code + bias`.
    Affine {
        /// Bits and group size.
        affine: Affine,
        /// `cols * bits / 8` bytes a row. At 4 bits the first of two inputs is the low half of a byte.
        codes: Bytes,
        /// `cols / group_size` values a row.
        scales: Floats,
        /// As `scales`.
        biases: Floats,
    },
    /// Values as they are, `cols` a row.
    Dense(Floats),
}

/// Type of a stored float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of a single.
    Bf16,
}

/// Floats in a file, little-endian, at any alignment (writers differ).
#[derive(Clone, Debug)]
pub struct Floats {
    /// Type of each.
    pub dtype: FloatType,
    /// Their bytes.
    pub data: Bytes,
}

impl FloatType {
    /// Bytes of one.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl Floats {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.data.len() / self.dtype.size()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Copies values from `start` on into `out`, as f32.
    #[inline]
    pub fn read(&self, start: usize, out: &mut [f32]) {
        let size = self.dtype.size();
        let bytes = &self.data[start * size..(start + out.len()) * size];
        match self.dtype {
            FloatType::F32 => fill(out, bytes, f32::from_le_bytes),
            FloatType::F16 => fill(out, bytes, |b| half::f16::from_le_bytes(b).to_f32()),
            FloatType::Bf16 => fill(out, bytes, |b| half::bf16::from_le_bytes(b).to_f32()),
        }
    }

    /// All values as f32.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.len()];
        self.read(0, &mut out);
        out
    }

    fn slice(&self, range: Range<usize>) -> Self {
        let size = self.dtype.size();
        Self { dtype: self.dtype, data: self.data.slice(range.start * size..range.end * size) }
    }
}

#[inline(always)]
fn fill<const N: usize>(out: &mut [f32], bytes: &[u8], value: impl Fn([u8; N]) -> f32) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *o = value(*b);
    }
}

impl Matrix {
    /// Rows `range` as a matrix of their own.
    pub fn slice_rows(&self, range: Range<usize>) -> Self {
        let of = |values_per_row: usize| range.start * values_per_row..range.end * values_per_row;
        let form = match &self.form {
            Form::Affine { affine, codes, scales, biases } => Form::Affine {
                affine: *affine,
                codes: codes.slice(of(self.cols * affine.bits / 8)),
                scales: scales.slice(of(self.cols / affine.group_size)),
                biases: biases.slice(of(self.cols / affine.group_size)),
            },
            Form::Dense(values) => Form::Dense(values.slice(of(self.cols))),
        };
        Self { rows: range.len(), cols: self.cols, form }
    }

    /// Row `row`, expanded to `cols` f32 values. This is the definition of what the stored matrix means.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        match &self.form {
            Form::Dense(values) => values.read(row * self.cols, out),
            Form::Affine { affine, codes, scales, biases } => {
                let codes = &codes[row * self.cols * affine.bits / 8..];
                let groups = self.cols / affine.group_size;
                for (g, out) in out.chunks_exact_mut(affine.group_size).enumerate() {
                    let (mut scale, mut bias) = ([0.0], [0.0]);
                    scales.read(row * groups + g, &mut scale);
                    biases.read(row * groups + g, &mut bias);
                    let first = g * affine.group_size;
                    for (i, o) in out.iter_mut().enumerate() {
                        *o = scale[0] * code(codes, affine.bits, first + i) + bias[0];
                    }
                }
            }
        }
    }

    /// Bytes that reading the whole matrix moves.
    pub fn bytes(&self) -> u64 {
        match &self.form {
            Form::Dense(values) => values.data.len() as u64,
            Form::Affine { codes, scales, biases, .. } => {
                (codes.len() + scales.data.len() + biases.data.len()) as u64
            }
        }
    }
}

fn code(codes: &[u8], bits: usize, i: usize) -> f32 {
    match bits {
        4 => f32::from(codes[i / 2] >> (4 * (i % 2)) & 15),
        _ => f32::from(codes[i]),
    }
}

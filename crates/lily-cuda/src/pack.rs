//! Matrices in the order in which the tensor cores take them; `kernels/common.cu` reads what is written here.

use lily_model::config::Affine;
use lily_model::matrix::{FloatType, Floats, Form, Matrix};
use rayon::prelude::*;

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Inputs of a tile.
pub const TILE_COLS: usize = 64;

/// How a tile's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// 4-bit codes with a bf16 scale and bias per row.
    Q4,
    /// 8-bit codes likewise.
    Q8,
    /// bf16 values.
    Bf16,
    /// The sum of two bf16: 16 bits of mantissa. What has no form of its own is held so.
    Bf16x2,
}

impl Packing {
    /// Bytes of a tile.
    pub fn tile_bytes(self) -> usize {
        match self {
            Self::Q4 => 576,
            Self::Q8 => 1088,
            Self::Bf16 => 2048,
            Self::Bf16x2 => 4096,
        }
    }

    /// Whether inputs meet the codes as integers of two digits; else as two bf16.
    pub fn takes_digits(self) -> bool {
        matches!(self, Self::Q4 | Self::Q8)
    }

    /// As the names of kernels end.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Q4 => "q4",
            Self::Q8 => "q8",
            Self::Bf16 => "bf16",
            Self::Bf16x2 => "bf16x2",
        }
    }

    /// The packing that holds all of `matrices` exactly, or [`Packing::Bf16x2`].
    pub fn of<'a>(matrices: impl IntoIterator<Item = &'a Matrix>) -> Self {
        Self::common(matrices.into_iter().map(Self::of_one))
    }

    /// The one that all are, or [`Packing::Bf16x2`].
    pub fn common(packings: impl IntoIterator<Item = Self>) -> Self {
        let mut all = packings.into_iter();
        let Some(first) = all.next() else { return Self::Bf16x2 };
        if all.all(|p| p == first) { first } else { Self::Bf16x2 }
    }

    /// Of a matrix that is quantised so, or not at all; `bf16`: its floats are.
    pub fn of_form(affine: Option<Affine>, bf16: bool) -> Self {
        match affine {
            // A wider group is written out once per tile.
            Some(Affine { bits, group_size }) if bf16 && group_size.is_multiple_of(TILE_COLS) => {
                if bits == 4 { Self::Q4 } else { Self::Q8 }
            }
            None if bf16 => Self::Bf16,
            _ => Self::Bf16x2,
        }
    }

    fn of_one(m: &Matrix) -> Self {
        let bf16 = |f: &Floats| f.dtype == FloatType::Bf16;
        match &m.form {
            Form::Affine { affine, scales, biases, .. } => {
                Self::of_form(Some(*affine), bf16(scales) && bf16(biases))
            }
            Form::Dense(values) => Self::of_form(None, bf16(values)),
        }
    }
}

/// Bytes of a packed matrix.
pub fn packed_bytes(rows: usize, cols: usize, packing: Packing) -> usize {
    rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS) * packing.tile_bytes()
}

/// A row of a packed matrix: which row of which matrix it is; `None`: zeros.
pub type RowSource<'a> = Option<(&'a Matrix, usize)>;

/// Packs rows of `cols` inputs each. Rows are padded to [`TILE_ROWS`], inputs to [`TILE_COLS`], with zeros.
pub fn pack(rows: &[RowSource<'_>], cols: usize, packing: Packing) -> Vec<u8> {
    let strip = cols.div_ceil(TILE_COLS) * packing.tile_bytes();
    let mut out = vec![0; rows.len().div_ceil(TILE_ROWS) * strip];
    out.par_chunks_exact_mut(strip).zip(rows.par_chunks(TILE_ROWS)).for_each(|(strip, rows)| {
        for (r, source) in rows.iter().enumerate() {
            if let Some((matrix, row)) = source {
                pack_row(strip, r, matrix, *row, packing);
            }
        }
    });
    out
}

/// Writes row `r` of a strip of tiles.
fn pack_row(strip: &mut [u8], r: usize, matrix: &Matrix, row: usize, packing: Packing) {
    match (&matrix.form, packing) {
        (Form::Affine { affine, codes, scales, biases }, Packing::Q4 | Packing::Q8) => {
            let bytes = matrix.cols * affine.bits / 8;
            let codes = &codes[row * bytes..(row + 1) * bytes];
            let groups = matrix.cols / affine.group_size;
            for (k, tile) in strip.chunks_exact_mut(packing.tile_bytes()).enumerate() {
                let group = row * groups + k * TILE_COLS / affine.group_size;
                let at = |f: &Floats| [f.data[2 * group], f.data[2 * group + 1]];
                pack_codes(tile, r, &codes[k * TILE_COLS * affine.bits / 8..], packing);
                let end = tile.len() - 64 + r % 8 * 8 + r / 8 * 4;
                tile[end..end + 2].copy_from_slice(&at(scales));
                tile[end + 2..end + 4].copy_from_slice(&at(biases));
            }
        }
        _ => {
            let mut values = vec![0.0; matrix.cols];
            matrix.read_row(row, &mut values);
            values.resize(matrix.cols.div_ceil(TILE_COLS) * TILE_COLS, 0.0);
            let tiles = strip.chunks_exact_mut(packing.tile_bytes());
            for (tile, values) in tiles.zip(values.chunks_exact(TILE_COLS)) {
                pack_values(tile, r, values, packing);
            }
        }
    }
}

/// The lane that holds the 16 inputs `t` of a row has 8 of them in each of two words.
fn chunks() -> impl Iterator<Item = (usize, usize)> {
    (0..4).flat_map(|t| (0..2).map(move |word| (t, word)))
}

fn pack_codes(tile: &mut [u8], r: usize, codes: &[u8], packing: Packing) {
    let (g, high) = (r % 8, r / 8);
    for (t, word) in chunks() {
        let (lane, first) = (g * 4 + t, t * 16 + word * 8);
        if packing == Packing::Q4 {
            let at = lane * 16 + (high * 2 + word) * 4;
            tile[at..at + 4].copy_from_slice(&codes[first / 2..first / 2 + 4]);
        } else {
            // As the nibbles of a word of 4-bit codes come apart.
            let at = word * 512 + lane * 16 + high * 8;
            for (i, j) in [0, 2, 4, 6, 1, 3, 5, 7].into_iter().enumerate() {
                tile[at + i] = codes[first + j];
            }
        }
    }
}

fn pack_values(tile: &mut [u8], r: usize, values: &[f32], packing: Packing) {
    let (g, high) = (r % 8, r / 8);
    for (t, word) in chunks() {
        for j in 0..8 {
            let (pair, half) = (j % 4, j / 4);
            let register = pair % 2 * 2 + high;
            let at = (word * 2 + pair / 2) * 512 + (g * 4 + t) * 16 + register * 4 + half * 2;
            let x = values[t * 16 + word * 8 + j];
            let hi = half::bf16::from_f32(x);
            tile[at..at + 2].copy_from_slice(&hi.to_le_bytes());
            if packing == Packing::Bf16x2 {
                let lo = half::bf16::from_f32(x - hi.to_f32());
                tile[2048 + at..2048 + at + 2].copy_from_slice(&lo.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lily_model::files::Bytes;

    use super::*;

    /// Value of a packed matrix, as `element` of `kernels/embed.cu` finds it.
    fn element(packed: &[u8], k_tiles: usize, row: usize, col: usize, packing: Packing) -> f32 {
        let at = (row / TILE_ROWS * k_tiles + col / TILE_COLS) * packing.tile_bytes();
        let tile = &packed[at..at + packing.tile_bytes()];
        let (g, high, k) = (row % 8, row / 8 % 2, col % TILE_COLS);
        let (lane, word, j) = (g * 4 + k / 16, k / 8 % 2, k % 8);
        let bf16 = |at: usize| half::bf16::from_le_bytes([tile[at], tile[at + 1]]).to_f32();
        let scaled = |code: u8, end: usize| {
            let at = end + g * 8 + high * 4;
            bf16(at) * f32::from(code) + bf16(at + 2)
        };
        match packing {
            Packing::Q4 => scaled(tile[lane * 16 + (high * 2 + word) * 4 + j / 2] >> (4 * (j % 2)) & 15, 512),
            Packing::Q8 => scaled(tile[word * 512 + lane * 16 + high * 8 + j % 2 * 4 + j / 2], 1024),
            Packing::Bf16 | Packing::Bf16x2 => {
                let at = (word * 2 + j % 4 / 2) * 512 + lane * 16 + (j % 2 * 2 + high) * 4 + j / 4 * 2;
                bf16(at) + if packing == Packing::Bf16x2 { bf16(2048 + at) } else { 0.0 }
            }
        }
    }

    fn floats(n: usize, salt: usize) -> Floats {
        let value = |i: usize| half::bf16::from_f32((i * 37 + salt) as f32 % 19.0 - 9.0);
        let data = (0..n).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>();
        Floats { dtype: FloatType::Bf16, data: Bytes::new(data) }
    }

    fn quantised(rows: usize, cols: usize, bits: usize, group_size: usize) -> Matrix {
        let codes: Vec<u8> = (0..rows * cols * bits / 8).map(|i| (i * 91 % 251) as u8).collect();
        let groups = rows * cols / group_size;
        let form = Form::Affine {
            affine: Affine { bits, group_size },
            codes: Bytes::new(codes),
            scales: floats(groups, 1),
            biases: floats(groups, 5),
        };
        Matrix { rows, cols, form }
    }

    #[test]
    fn packed_values_are_those_of_the_matrix() {
        let dense = Matrix { rows: 21, cols: 128, form: Form::Dense(floats(21 * 128, 3)) };
        let cases = [
            (quantised(21, 128, 4, 64), Packing::Q4),
            (quantised(21, 128, 4, 128), Packing::Q4),
            (quantised(21, 128, 8, 64), Packing::Q8),
            (quantised(21, 128, 4, 32), Packing::Bf16x2),
            (dense, Packing::Bf16),
        ];
        for (matrix, packing) in cases {
            assert_eq!(Packing::of([&matrix]), packing);
            let rows: Vec<_> = (0..21).map(|r| Some((&matrix, r))).collect();
            let packed = pack(&rows, 128, packing);
            assert_eq!(packed.len(), packed_bytes(21, 128, packing));
            let mut expected = vec![0.0; 128];
            for row in 0..32 {
                expected.fill(0.0);
                if row < 21 {
                    matrix.read_row(row, &mut expected);
                }
                for (col, x) in expected.iter().enumerate() {
                    let got = element(&packed, 2, row, col, packing);
                    assert!(
                        (got - x).abs() <= x.abs() * 1e-5,
                        "{packing:?} {row} {col}: {got}, expected {x}"
                    );
                }
            }
        }
    }

    #[test]
    fn forms_that_differ_are_held_as_sums_of_two() {
        let (a, b) = (quantised(16, 64, 4, 64), quantised(16, 64, 8, 64));
        assert_eq!(Packing::of([&a, &a]), Packing::Q4);
        assert_eq!(Packing::of([&a, &b]), Packing::Bf16x2);
    }
}

//! A small product with the tensor operations of Metal 4, against the CPU, before a model is trusted to them: how they divide a
//! matrix among threads is the GPU's secret, and nobody had one at hand when the kernels were written.

use half::{bf16, f16};

use crate::batch::{SMALL_TENSOR_ROWS, TILE_OUTS, TILE_ROWS, TILE_THREADS, tensor_memory};
use crate::device::{Argument, Device, DeviceError, Dispatch, Place};
use crate::plan::{GROUP, LANES};

/// Of the largest sum: the order of sums.
const TOLERANCE: f32 = 1e-4;
/// Outputs and inputs: fewer than a tile has, and more than are brought at a time.
const OUTS: usize = TILE_OUTS - 4;
const COLS: usize = 2 * GROUP;
/// Kernels, and rows of their tiles.
const PRODUCTS: [(&str, usize); 2] = [("matmul_tensor", TILE_ROWS), ("matmul_tensor_32", SMALL_TENSOR_ROWS)];

/// What is multiplied.
struct Product {
    x: Vec<f32>,
    /// Two a byte, the first in the lower half.
    codes: Vec<u8>,
    scales: Vec<bf16>,
    biases: Vec<bf16>,
}

impl Product {
    /// As a model's numbers are: weights around 0.
    fn new(rows: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(rows as u64);
        let groups = OUTS * COLS / GROUP;
        Self {
            x: (0..rows * COLS).map(|_| random.f32() * 4.0 - 2.0).collect(),
            codes: (0..OUTS * COLS / 2).map(|_| random.u8(..)).collect(),
            scales: (0..groups).map(|_| bf16::from_f32(0.01 + 0.01 * random.f32())).collect(),
            biases: (0..groups).map(|_| bf16::from_f32(-0.08 - 0.08 * random.f32())).collect(),
        }
    }

    fn weight(&self, out: usize, col: usize) -> f32 {
        let at = out * COLS + col;
        let code = self.codes[at / 2] >> (4 * (at % 2)) & 0xf;
        self.scales[at / GROUP].to_f32() * f32::from(code) + self.biases[at / GROUP].to_f32()
    }

    /// `[rows, OUTS]`, of numbers rounded to half.
    fn expected(&self) -> Vec<f32> {
        let half = |x: f32| f16::from_f32(x).to_f32();
        let sum =
            |x: &[f32], out| x.iter().enumerate().map(|(i, &x)| half(x) * half(self.weight(out, i))).sum();
        let rows = self.x.chunks_exact(COLS);
        rows.flat_map(|x| (0..OUTS).map(move |out| sum(x, out)).collect::<Vec<f32>>()).collect()
    }

    /// The same, by a kernel that has `tile` rows a tile.
    fn computed(&self, device: &mut dyn Device, name: &str, tile: usize) -> Result<Vec<f32>, DeviceError> {
        let missing = || DeviceError::Missing { what: format!("kernel {name}"), why: String::new() };
        let (kernel, pipeline) = device.kernel(name).ok_or_else(missing)?;
        if pipeline.lanes != LANES || pipeline.max_threads < TILE_THREADS {
            let why = format!("{} threads of {} a SIMD-group", pipeline.max_threads, pipeline.lanes);
            return Err(DeviceError::Missing { what: format!("room for kernel {name}"), why });
        }
        let halves = |values: &[bf16]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let floats = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let rows = self.x.len() / COLS;
        let words = [rows, COLS, OUTS, OUTS, 0].map(|n| n as u32);
        let mut arguments = Vec::new();
        for bytes in [floats(&self.x), self.codes.clone(), halves(&self.scales), halves(&self.biases)] {
            let place =
                Place { buffer: device.allocate(bytes.len(), "a check of tensor operations")?, offset: 0 };
            device.write(place, &bytes);
            arguments.push(Argument::Place(place));
        }
        let mut y = vec![0; rows * OUTS * 4];
        let place = Place { buffer: device.allocate(y.len(), "a check of tensor operations")?, offset: 0 };
        device.write(place, &floats(&vec![f32::NAN; rows * OUTS]));
        arguments.extend([Argument::words(&words).ok_or_else(missing)?, Argument::Place(place)]);
        let submission = device.submit(&mut |encoder| {
            encoder.dispatch(&Dispatch {
                kernel,
                grid: [1; 3],
                threads: TILE_THREADS,
                threadgroup_memory: &tensor_memory(tile, TILE_OUTS),
                arguments: &arguments,
                barrier: false,
            });
        })?;
        let ended = device.wait(submission);
        device.retire(submission);
        ended?;
        device.read(place, &mut y);
        Ok(y.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

/// Says what is wrong with the tensor operations of a device whose kernels are compiled, if anything is.
pub fn check(device: &mut dyn Device) -> Result<(), String> {
    for (name, tile) in PRODUCTS {
        // Not all of a tile.
        let product = Product::new(tile - 5);
        let got = product.computed(device, name, tile).map_err(|e| e.to_string())?;
        let expected = product.expected();
        let size = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE * size;
        if let Some(at) = got.iter().zip(&expected).position(|pair| !close(pair)) {
            let (row, out) = (at / OUTS, at % OUTS);
            return Err(format!(
                "{name} gives {} in row {row}, output {out}, expected {}",
                got[at], expected[at]
            ));
        }
    }
    Ok(())
}

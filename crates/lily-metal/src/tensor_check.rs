//! Small products with the tensor operations of Metal 4, against the CPU, before a model is trusted to them: how they divide a
//! matrix among threads is the GPU's secret, and nobody had one at hand when the kernels were written.

use half::{bf16, f16};
use lily_model::config::Config;

use crate::builder::TENSOR_ROWS;
use crate::device::{Argument, Device, DeviceError, Dispatch, Place};
use crate::plan::{GROUP, Launch, PAGE, Plan, bits};

/// Of the largest value: the order of sums.
const TOLERANCE: f32 = 1e-4;
/// Of sums with weights that were rounded to bf16.
const BF16_TOLERANCE: f32 = 1e-2;

/// What a buffer holds at first.
enum Given {
    Bytes(Vec<u8>),
    Words(Vec<u32>),
    /// So many floats, which are read afterwards.
    Output(usize),
}

/// bf16 as bytes.
fn halves(values: &[bf16]) -> Given {
    Given::Bytes(values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Says what is wrong with the kernels with tensor operations of a model's plans, which are compiled, if anything is.
pub fn check(device: &mut dyn Device, config: &Config, plans: &[Plan]) -> Result<(), String> {
    let launches = || plans.iter().flat_map(|plan| &plan.launches);
    for (kernel, rows) in [("matmul_tensor", 59), ("matmul_tensor_32", 21)] {
        if let Some(launch) = launches().find(|l| l.kernel == kernel) {
            check_product(device, launch, config, rows)?;
        }
    }
    match launches().find(|l| l.kernel == "attend_tensor") {
        Some(launch) => check_attention(device, launch, config),
        None => Ok(()),
    }
}

/// Runs a kernel with the threads and the threadgroup memory of a launch; gives its outputs.
fn run(
    device: &mut dyn Device,
    launch: &Launch,
    grid: [usize; 3],
    given: Vec<Given>,
) -> Result<Vec<Vec<f32>>, DeviceError> {
    let name = launch.kernel;
    let missing = |what: String| DeviceError::Missing { what, why: String::new() };
    let (kernel, _) = device.kernel(name).ok_or_else(|| missing(format!("kernel {name}")))?;
    let (mut arguments, mut outputs) = (Vec::new(), Vec::new());
    for given in given {
        let bytes = match given {
            Given::Words(words) => {
                let words = Argument::words(&words);
                arguments.push(words.ok_or_else(|| missing(format!("room for the numbers of {name}")))?);
                continue;
            }
            Given::Bytes(bytes) => bytes,
            Given::Output(count) => {
                outputs.push((arguments.len(), count));
                floats(&vec![f32::NAN; count])
            }
        };
        let buffer = device.allocate(bytes.len(), "a check of tensor operations")?;
        device.write(Place { buffer, offset: 0 }, &bytes);
        arguments.push(Argument::Place(Place { buffer, offset: 0 }));
    }
    let submission = device.submit(&mut |encoder| {
        let Launch { threads, threadgroup_memory, .. } = launch;
        let (threads, arguments) = (*threads, &arguments);
        encoder.dispatch(&Dispatch { kernel, grid, threads, threadgroup_memory, arguments, barrier: false });
    })?;
    let ended = device.wait(submission);
    device.retire(submission);
    ended?;
    let read = |(argument, count): (usize, usize)| {
        let mut bytes = vec![0; 4 * count];
        if let Argument::Place(place) = arguments[argument] {
            device.read(place, &mut bytes);
        }
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    Ok(outputs.into_iter().map(read).collect())
}

/// Says where values differ, if they do; what isn't a number does.
fn compare(kernel: &str, width: usize, got: &[f32], expected: &[f32], tolerance: f32) -> Result<(), String> {
    let size = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * size;
    match got.iter().zip(expected).position(|pair| !close(pair)) {
        Some(at) => Err(format!(
            "{kernel} gives {} in row {}, column {}, expected {}",
            got[at],
            at / width,
            at % width,
            expected[at]
        )),
        None => Ok(()),
    }
}

/// A product of fewer rows and outputs than a tile has, and of more inputs than are brought at once.
fn check_product(
    device: &mut dyn Device,
    launch: &Launch,
    config: &Config,
    rows: usize,
) -> Result<(), String> {
    const OUTS: usize = 60;
    const COLS: usize = 2 * GROUP;
    let mut random = fastrand::Rng::with_seed(rows as u64);
    let x: Vec<f32> = (0..rows * COLS).map(|_| random.f32() * 4.0 - 2.0).collect();
    // Weights around 0, as a model's are.
    let codes: Vec<u8> = (0..OUTS * COLS / 2).map(|_| random.u8(..)).collect();
    let mut of_groups = |low: f32, high: f32| -> Vec<bf16> {
        (0..OUTS * COLS / GROUP).map(|_| bf16::from_f32(low + (high - low) * random.f32())).collect()
    };
    let (scales, biases) = (of_groups(0.01, 0.02), of_groups(-0.16, -0.08));
    let half = |x: f32| f16::from_f32(x).to_f32();
    let quantised = |at: usize| {
        let code = f32::from(codes[at / 2] >> (4 * (at % 2)) & 0xf);
        scales[at / GROUP].to_f32() * code + biases[at / GROUP].to_f32()
    };
    // A model in bf16 has the values themselves where others have codes.
    let plain: Vec<bf16> = (0..OUTS * COLS).map(|at| bf16::from_f32(quantised(at))).collect();
    let is_plain = bits(config).matrices == 16;
    let weight = |at: usize| half(if is_plain { plain[at].to_f32() } else { quantised(at) });
    let sum = |x: &[f32], out: usize| (0..COLS).map(|i| half(x[i]) * weight(out * COLS + i)).sum::<f32>();
    let expected = x.chunks_exact(COLS).flat_map(|x| (0..OUTS).map(move |out| sum(x, out)));
    let expected: Vec<f32> = expected.collect();
    // Whole tiles are read.
    let halves_of_x = x.iter().copied().chain([0.0; TENSOR_ROWS * COLS]).map(f16::from_f32);
    let given = vec![
        Given::Bytes(halves_of_x.flat_map(f16::to_le_bytes).collect()),
        if is_plain { halves(&plain) } else { Given::Bytes(codes.clone()) },
        halves(&scales),
        halves(&biases),
        Given::Words([rows, COLS, OUTS, 0].map(|n| n as u32).to_vec()),
        Given::Output(rows * OUTS),
    ];
    let got = run(device, launch, [1; 3], given).map_err(|e| e.to_string())?;
    compare(launch.kernel, OUTS, &got[0], &expected, TOLERANCE)
}

/// Attention of two tokens over two pages, the second of them not full.
fn check_attention(device: &mut dyn Device, launch: &Launch, config: &Config) -> Result<(), String> {
    const ROWS: usize = 2;
    const POSITION: usize = PAGE + 40;
    let a = &config.attention;
    let (heads, width, d) = (a.heads, a.kv_width(), a.head_dim);
    let mut random = fastrand::Rng::with_seed(1);
    let mut values = |count: usize, size: f32| -> Vec<bf16> {
        (0..count).map(|_| bf16::from_f32((random.f32() * 2.0 - 1.0) * size)).collect()
    };
    let queries = values(ROWS * heads * d, 4.0 / (d as f32).sqrt());
    let mut cache = || {
        let mut cache = values(2 * PAGE * width, 1.0);
        cache[(POSITION + ROWS) * width..].fill(bf16::ZERO);
        cache
    };
    let (keys, cached) = (cache(), cache());
    let mut expected = Vec::new();
    for (i, q) in queries.chunks_exact(d).enumerate() {
        let kv_head = i % heads / (heads / a.kv_heads);
        let row = |t: usize| t * width + kv_head * d..t * width + (kv_head + 1) * d;
        let dot = |k: &[bf16]| q.iter().zip(k).map(|(q, k)| q.to_f32() * k.to_f32()).sum::<f32>();
        let weights: Vec<f32> = (0..=POSITION + i / heads).map(|t| dot(&keys[row(t)]).exp()).collect();
        let total: f32 = weights.iter().sum();
        let mut out = vec![0.0; d];
        for (t, weight) in weights.iter().enumerate() {
            out.iter_mut().zip(&cached[row(t)]).for_each(|(o, v)| *o += weight / total * v.to_f32());
        }
        expected.extend(out);
    }
    let given = vec![
        halves(&queries),
        Given::Words(vec![POSITION as u32]),
        // In one part, from the first tile on.
        Given::Words(vec![ROWS as u32, 1, 0]),
        halves(&keys),
        halves(&cached),
        Given::Output(ROWS * heads * d),
        Given::Output(ROWS * heads * 2),
        Given::Words(vec![0, 1]),
    ];
    // A tile has room for two tokens at least.
    let got = run(device, launch, [1, a.kv_heads, 1], given).map_err(|e| e.to_string())?;
    let merged: Vec<f32> = got[0].iter().enumerate().map(|(i, sum)| sum / got[1][i / d * 2 + 1]).collect();
    compare(launch.kernel, d, &merged, &expected, BF16_TOLERANCE)
}

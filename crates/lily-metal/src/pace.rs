//! Which launches of a step are one command buffer: as many as the slowest GPU should be able to run within [`LONGEST`].
//!
//! macOS ends command buffers that keep the GPU from the screen for too long, by its own judgement: errors are named
//! `kIOGPUCommandBufferCallbackErrorTimeout` and `...ImpactingInteractivity`. A single launch may be too long too, which is so for
//! attention behind many positions: its tiles can be launched some at a time.

use std::ops::Range;
use std::time::Duration;

use crate::plan::{Contents, Launch, Plan};

/// Time of a command buffer, predicted by the numbers below. An M1 should need a third of it, by the predictions of docs/lab/metal.md,
/// and every other GPU less.
pub const LONGEST: Duration = Duration::from_millis(200);

/// Command buffers that may be under way: as many as two steps of 2,048 tokens are behind all positions that the model can have. With
/// still longer steps the next one waits for the first to end.
pub const MOST_BUFFERS: usize = 2048;

// What the slowest GPUs reach at least. Nothing of it was measured; see docs/lab/metal.md.

/// Multiply-adds a second, a quarter of what 8 cores of an M1 do at most: 8 x 128 at 1.28 GHz.
const MULTIPLY_ADDS: f64 = 0.325e12;
/// The same of tensor operations: 8 cores of an M5, 512 of each a clock, at 1.6 GHz.
const TENSOR_MULTIPLY_ADDS: f64 = 1.6e12;
/// Bytes a second, of the 68 GB/s of an M1.
const BYTES: f64 = 50e9;
/// Seconds that a launch takes in any case: waiting for the stage before it, and starting.
const LAUNCH: f64 = 20e-6;

/// Kernels that can be launched some threadgroups at a time: the last of their numbers is the first one's place in the grid's last
/// dimension.
const DIVISIBLE: [&str; 2] = ["attend_rows", "attend_tensor"];

/// How long a launch takes, at most, as predicted; in the mean of tokens, of which one in some writes the recurrent state: in all layers
/// of a sequence of the real model that takes a millisecond more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// At the start of a sequence.
    seconds: f64,
    /// What each position of its segment's sequence adds.
    seconds_per_position: f64,
    segment: usize,
    /// Threadgroups in the last dimension of its grid, if it can be divided there; else 1.
    groups: usize,
}

/// A launch, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its place in the plan.
    pub launch: usize,
    /// Of a part, which threadgroups, in the last dimension of the grid. Parts of a launch may run together.
    pub groups: Option<Range<usize>>,
}

impl Plan {
    /// How long each launch takes.
    pub fn paces(&self) -> Vec<Pace> {
        self.launches.iter().map(|launch| self.pace(launch)).collect()
    }

    fn pace(&self, launch: &Launch) -> Pace {
        let rate = if launch.kernel.contains("_tensor") { TENSOR_MULTIPLY_ADDS } else { MULTIPLY_ADDS };
        let seconds =
            |bytes: u64, multiply_adds: u64| (bytes as f64 / BYTES).max(multiply_adds as f64 / rate);
        // Activations of many tokens are no more in the caches.
        let is_activations = |c: &Contents| matches!(c, Contents::Scratch(_) | Contents::Logits);
        let activations = launch.bindings.iter().filter(|b| is_activations(&self.buffers[b.buffer].contents));
        let bytes = launch.bytes() + activations.map(|b| b.length as u64).sum::<u64>();
        let segment = launch.bindings.iter().find(|b| b.bytes_per_position > 0);
        Pace {
            seconds: LAUNCH + seconds(bytes, launch.multiply_adds()),
            seconds_per_position: seconds(launch.bytes_per_position(), launch.multiply_adds_per_position()),
            segment: segment.map_or(0, |b| self.buffers[b.buffer].segment),
            groups: if DIVISIBLE.contains(&launch.kernel) { launch.grid[2] } else { 1 },
        }
    }
}

/// Divides launches among command buffers, in order, none of which should take longer than `longest`, but where a launch that can't
/// be divided does. `positions`: of each segment, how many tokens of its sequence came before. They are cut anywhere: a buffer begins
/// when all of the one before is done, as a stage does.
pub fn command_buffers(paces: &[Pace], positions: &[usize], longest: Duration) -> Vec<Vec<Slice>> {
    let longest = longest.as_secs_f64();
    let (mut buffers, mut slices, mut taken) = (Vec::new(), Vec::new(), 0.0);
    for (launch, pace) in paces.iter().enumerate() {
        let position = positions.get(pace.segment).copied().unwrap_or(0);
        let seconds = pace.seconds + pace.seconds_per_position * position as f64;
        let each = seconds / pace.groups as f64;
        let most = ((longest / each) as usize).clamp(1, pace.groups);
        let parts = pace.groups.div_ceil(most);
        for part in 0..parts {
            let groups = part * pace.groups / parts..(part + 1) * pace.groups / parts;
            let seconds = each * groups.len() as f64;
            if taken + seconds > longest && !slices.is_empty() {
                buffers.push(std::mem::take(&mut slices));
                taken = 0.0;
            }
            slices.push(Slice { launch, groups: (parts > 1).then_some(groups) });
            taken += seconds;
        }
    }
    buffers.push(slices);
    buffers
}

#[cfg(test)]
mod tests {
    use lily_model::config::Config;
    use lily_model::presets::CONFIG_35B_A3B;

    use super::*;
    use crate::plan::{Features, KvType, Segment, Want, plan_step};

    const CONTEXT: usize = 262_144;

    fn plan(tensor: bool, segments: &[(usize, Want)]) -> Plan {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let segment = |&(tokens, want)| Segment { tokens, capacity: CONTEXT, want };
        let segments: Vec<Segment> = segments.iter().map(segment).collect();
        plan_step(&config, Features { kv: KvType::Bf16, tensor }, &segments).unwrap()
    }

    fn seconds(pace: &Pace, position: usize) -> f64 {
        pace.seconds + pace.seconds_per_position * position as f64
    }

    /// As docs/lab/metal.md says.
    #[test]
    fn a_token_of_the_real_model_is_one_command_buffer_wherever_it_is() {
        for position in [0, CONTEXT - 1] {
            let paces = plan(false, &[(1, Want::Last)]).paces();
            let all: f64 = paces.iter().map(|pace| seconds(pace, position)).sum();
            println!("position {position}: {:.0} ms", 1e3 * all);
            let whole = (0..paces.len()).map(|launch| Slice { launch, groups: None }).collect();
            assert_eq!(command_buffers(&paces, &[position], LONGEST), [whole] as [Vec<Slice>; 1]);
        }
    }

    #[test]
    fn no_command_buffer_of_the_real_model_takes_too_long() {
        let long = LONGEST.as_secs_f64();
        for (tensor, tokens) in [(false, 8), (false, 512), (true, 512), (false, 2048), (true, 2048)] {
            let plan = plan(tensor, &[(tokens, Want::Last)]);
            let paces = plan.paces();
            for position in [0, 4096, 131_072, CONTEXT - tokens] {
                let buffers = command_buffers(&paces, &[position], LONGEST);
                let all: f64 = paces.iter().map(|pace| seconds(pace, position)).sum();
                println!("{tensor} {tokens} at {position}: {:.2} s in {}", all, buffers.len());
                let time = |slice: &Slice| {
                    let pace = &paces[slice.launch];
                    let part = slice.groups.as_ref().map_or(1.0, |g| g.len() as f64 / pace.groups as f64);
                    part * seconds(pace, position)
                };
                for slices in &buffers {
                    let taken: f64 = slices.iter().map(time).sum();
                    assert!(taken <= long, "{taken} s");
                }
                assert!(2 * buffers.len() <= MOST_BUFFERS);
            }
        }
    }

    /// Each threadgroup of each launch once, in order.
    #[test]
    fn nothing_is_left_out_and_nothing_done_twice() {
        let plan = plan(false, &[(100, Want::Last), (30, Want::Nothing), (1, Want::Last)]);
        let paces = plan.paces();
        for micros in [0, 50, 1_000, 100_000] {
            let buffers = command_buffers(&paces, &[0, 70_000, 200_000], Duration::from_micros(micros));
            assert!(buffers.iter().all(|slices| !slices.is_empty()));
            let mut slices = buffers.iter().flatten().peekable();
            for (i, launch) in plan.launches.iter().enumerate() {
                let mut next = 0;
                while let Some(slice) = slices.next_if(|slice| slice.launch == i) {
                    let groups = slice.groups.clone().unwrap_or(0..launch.grid[2]);
                    assert!(slice.groups.is_none() || DIVISIBLE.contains(&launch.kernel));
                    assert!(groups.start == next && !groups.is_empty());
                    next = groups.end;
                }
                assert_eq!(next, launch.grid[2], "{}", launch.kernel);
            }
            assert_eq!(slices.next(), None);
        }
    }

    /// Only the segment whose sequence is long takes long.
    #[test]
    fn positions_are_those_of_each_segment() {
        let paces = plan(false, &[(64, Want::Last), (64, Want::Last)]).paces();
        let count = |positions: &[usize]| command_buffers(&paces, positions, LONGEST).len();
        assert!(count(&[0, 0]) < count(&[100_000, 0]));
        assert_eq!(count(&[100_000, 0]), count(&[0, 100_000]));
        assert!(count(&[100_000, 0]) < count(&[100_000, 100_000]));
    }
}

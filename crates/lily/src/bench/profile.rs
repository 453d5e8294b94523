//! `lily bench --profile`: the kernels of a decode step and of a chunk of a prompt.

use std::io::{self, Write};

use lily_cuda::profile::{KernelCost, Profile, Work};
use serde_json::{Value, json};

/// Bytes a second that a kernel alone moves.
fn speed(kernel: &KernelCost) -> f64 {
    kernel.bytes as f64 / kernel.alone_us * 1e6
}

/// For programs.
pub fn json(profile: &Profile) -> Value {
    let kernel = |k: &KernelCost| {
        json!({
            "kernel": k.name,
            "launches": k.launches,
            "bytes": k.bytes,
            "alone_us": k.alone_us,
            "in_step_us": k.in_step_us,
            "bytes_per_s": speed(k),
            "share_of_bandwidth": speed(k) / profile.copy_bytes_per_s,
        })
    };
    let (step, batch) = match profile.work {
        Work::Decode(batch) => ("decode", batch),
        Work::Chunk(_) => ("chunk", 1),
    };
    json!({
        "step": step,
        "batch": batch,
        "tokens": profile.work.tokens(),
        "position": profile.position,
        "step_us": profile.step_us,
        "copy_bytes_per_s": profile.copy_bytes_per_s,
        "bytes": profile.kernels.iter().map(|k| k.bytes).sum::<u64>(),
        "launches": profile.kernels.iter().map(|k| k.launches).sum::<usize>(),
        "kernels": profile.kernels.iter().map(kernel).collect::<Value>(),
    })
}

/// For people. Times and bytes are those of one launch.
pub fn write(out: &mut impl Write, profile: &Profile) -> io::Result<()> {
    let Profile { work, position, step_us, copy_bytes_per_s, kernels } = profile;
    let launches: usize = kernels.iter().map(|k| k.launches).sum();
    let what = match work {
        Work::Decode(batch) => format!("a step of {batch}"),
        Work::Chunk(tokens) => format!("a chunk of {tokens}"),
    };
    writeln!(
        out,
        "\n{what} at position {position}: {step_us:.0} us, {:.0} tok/s, {launches} kernels; the device copies {:.2} TB/s",
        work.tokens() as f64 / step_us * 1e6,
        copy_bytes_per_s / 1e12
    )?;
    writeln!(
        out,
        "{:<22}{:>9}{:>10}{:>10}{:>12}{:>8}{:>14}",
        "kernel", "launches", "MB", "alone us", "in step us", "TB/s", "of bandwidth"
    )?;
    for k in kernels {
        let each = |x: f64| x / k.launches as f64;
        writeln!(
            out,
            "{:<22}{:>9}{:>10.2}{:>10.2}{:>12.2}{:>8.2}{:>12.0} %",
            k.name,
            k.launches,
            each(k.bytes as f64) / 1e6,
            each(k.alone_us),
            each(k.in_step_us),
            speed(k) / 1e12,
            100.0 * speed(k) / copy_bytes_per_s
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_measured_bandwidth() {
        let kernel =
            |name, launches, bytes, alone_us| KernelCost { name, launches, bytes, alone_us, in_step_us: 1.0 };
        let profile = Profile {
            work: Work::Decode(1),
            position: 16,
            step_us: 1000.0,
            copy_bytes_per_s: 4e12,
            kernels: vec![
                kernel("project_q4", 40, 400_000_000, 200.0),
                kernel("delta", 30, 60_000_000, 60.0),
            ],
        };
        let report = json(&profile);
        assert_eq!(report["kernels"][0]["share_of_bandwidth"], 0.5);
        assert_eq!(report["kernels"][1]["bytes_per_s"], 1e12);
        assert_eq!((&report["launches"], &report["bytes"]), (&70.into(), &460_000_000.into()));
        let mut text = Vec::new();
        write(&mut text, &profile).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("a step of 1 at position 16: 1000 us, 1000 tok/s, 70 kernels; "), "{text}");
        assert!(text.contains("the device copies 4.00 TB/s"), "{text}");
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(row, ["delta", "30", "2.00", "2.00", "0.03", "1.00", "25", "%"]);
    }

    #[test]
    fn a_chunk_is_told_from_a_decode_step() {
        let profile = |work| Profile {
            work,
            position: 3584,
            step_us: 51_200.0,
            copy_bytes_per_s: 4e12,
            kernels: vec![],
        };
        let (decode, chunk) = (profile(Work::Decode(8)), profile(Work::Chunk(512)));
        let fields = |p| ["step", "batch", "tokens"].map(|name| json(p)[name].clone());
        assert_eq!(fields(&decode), [json!("decode"), json!(8), json!(8)]);
        assert_eq!(fields(&chunk), [json!("chunk"), json!(1), json!(512)]);
        let mut text = Vec::new();
        write(&mut text, &chunk).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(
            text.contains("a chunk of 512 at position 3584: 51200 us, 10000 tok/s, 0 kernels; "),
            "{text}"
        );
    }
}

//! Steps that are several command buffers, on a device that runs the kernels on the CPU.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::time::Duration;

use common::Order;
use common::device::ShimDevice;
use common::model::{Model, folder};
use lily_metal::{MetalBackend, Options, pace};
use lily_model::backend::{Backend, Batch, Output, Rows, Segment, SegmentError, SeqId, Ticket, Tokens, Want};
use lily_model::sample::SampleParams;

type Shim = MetalBackend<ShimDevice>;

/// Each launch is one, and each tile of attention.
const SHORTEST: Duration = Duration::from_nanos(1);

fn backend(device: ShimDevice, longest_buffer: Duration) -> Shim {
    let model = Model::load(&folder("tests/data/nano/mlx-4bit"));
    let options = Options {
        context: 128,
        max_batch_tokens: 128,
        max_sequences: 2,
        aligned_copies: false,
        longest_buffer,
        ..Options::default()
    };
    MetalBackend::new(device, model.config.clone(), &model.weights, &options).unwrap()
}

fn device(tensor: bool) -> ShimDevice {
    let mut device = if tensor { ShimDevice::with_tensors(1 << 30) } else { ShimDevice::new(1 << 30) };
    device.order = Order::Random(5);
    device
}

fn prompt(seq: SeqId, start: u32, count: u32, want: Want) -> Segment {
    Segment { seq, start, tokens: Tokens::Ids((start..start + count).map(|i| 5 * i + 3).collect()), want }
}

fn greedy() -> Want {
    Want::Sample(SampleParams::greedy().into())
}

fn forward(backend: &mut Shim, segments: Vec<Segment>) -> (Ticket, u64) {
    let before = backend.device().submissions;
    let ticket = backend.forward(&Batch { segments }).unwrap();
    (ticket, backend.device().submissions - before)
}

/// Logits or a token, to the bit.
fn bits(output: Output) -> Vec<u32> {
    match output {
        Output::Logits(logits) => logits.into_iter().map(f32::to_bits).collect(),
        Output::Sampled(sampled) => vec![sampled.token],
        Output::Nothing => Vec::new(),
    }
}

/// The first of these steps: two prompts, a token behind one, more of the other, a token behind that. How many command buffers each
/// is.
fn read_and_write(backend: &mut Shim, steps: usize) -> (Vec<Vec<u32>>, Vec<u64>) {
    let (a, b) = (backend.create(100).unwrap(), backend.create(100).unwrap());
    let last = Want::Logits(Rows::Last);
    let all = [
        vec![prompt(a, 0, 18, greedy()), prompt(b, 0, 9, last.clone())],
        vec![Segment { seq: a, start: 18, tokens: Tokens::LastSampled, want: last.clone() }],
        vec![prompt(b, 9, 20, last.clone())],
        vec![prompt(b, 29, 1, last)],
    ];
    let (mut outputs, mut buffers, mut tickets) = (Vec::new(), Vec::new(), Vec::new());
    for segments in all.into_iter().take(steps) {
        let (ticket, count) = forward(backend, segments);
        tickets.push(ticket);
        buffers.push(count);
        if tickets.len() == 2 {
            outputs.extend(backend.wait(tickets.remove(0)).unwrap());
        }
    }
    outputs.extend(backend.wait(tickets.remove(0)).unwrap());
    (outputs.into_iter().map(|output| bits(output.unwrap())).collect(), buffers)
}

#[test]
fn a_step_of_several_command_buffers_is_to_the_bit_what_it_is_as_one() {
    // Tensor operations take long to emulate.
    for (tensor, steps) in [(false, 4), (true, 1)] {
        let (whole, buffers) = read_and_write(&mut backend(device(tensor), pace::LONGEST), steps);
        assert_eq!(buffers, vec![1; steps]);
        let (apart, most) = read_and_write(&mut backend(device(tensor), SHORTEST), steps);
        assert!(most.iter().all(|&n| n > 20), "{most:?}");
        assert!(whole == apart);
        if !tensor {
            let (some, fewer) =
                read_and_write(&mut backend(device(tensor), Duration::from_micros(200)), steps);
            assert!(fewer.iter().zip(&most).all(|(n, most)| (2..*most).contains(n)), "{fewer:?}, {most:?}");
            assert!(whole == some);
        }
    }
}

/// A prompt is read in a step; in the next one another, of whose command buffers one fails or is refused, if `spoil` says so; and
/// more of the first one, handed over before anybody knows. What each step gives, and of how many command buffers the second is.
fn three_steps(spoil: impl Fn(&mut ShimDevice)) -> (Vec<Result<Vec<u32>, SegmentError>>, u64) {
    let mut backend = backend(device(false), SHORTEST);
    let (a, b) = (backend.create(100).unwrap(), backend.create(100).unwrap());
    let last = Want::Logits(Rows::Last);
    let (first, _) = forward(&mut backend, vec![prompt(a, 0, 17, last.clone())]);
    spoil(backend.device());
    let (second, count) = forward(&mut backend, vec![prompt(b, 0, 18, greedy())]);
    let mut outputs = backend.wait(first).unwrap();
    let (third, later) = forward(&mut backend, vec![prompt(a, 17, 9, last)]);
    outputs.extend(backend.wait(second).unwrap());
    // The host may write to the second step's memory now: nothing of it is on its way.
    assert_eq!(backend.device().waiting() as u64, later);
    outputs.extend(backend.wait(third).unwrap());
    (outputs.into_iter().map(|output| output.map(bits)).collect(), count)
}

#[test]
fn a_failed_command_buffer_fails_its_step_and_no_other() {
    let (expected, count) = three_steps(|_| ());
    assert!(expected.iter().all(Result::is_ok));
    let check = |(got, _): (Vec<Result<Vec<u32>, SegmentError>>, u64), words: &str| {
        assert!(got[0] == expected[0] && got[2] == expected[2]);
        assert_eq!(got[1].as_ref().unwrap_err().to_string(), format!("the device failed: {words}"));
    };
    for failed in [0, count / 2] {
        let outcome = three_steps(|device| device.failing = Some(failed));
        check(outcome, "the GPU stopped its work: it fails on purpose");
    }
    let outcome = three_steps(|device| device.accepting = Some(count / 2));
    assert_eq!(outcome.1, count / 2);
    check(outcome, "Metal has no command buffer");
}

/// Then nothing was handed over, and the step may come again.
#[test]
fn a_step_whose_first_command_buffer_is_refused_changes_nothing() {
    let mut backend = backend(device(false), SHORTEST);
    let seq = backend.create(100).unwrap();
    let step = || vec![prompt(seq, 0, 33, Want::Logits(Rows::Last))];
    backend.device().accepting = Some(0);
    let e = backend.forward(&Batch { segments: step() }).unwrap_err();
    assert_eq!(e.to_string(), "device error: Metal has no command buffer");
    assert_eq!(backend.device().waiting(), 0);
    let (ticket, _) = forward(&mut backend, step());
    assert!(backend.wait(ticket).unwrap()[0].is_ok());
}

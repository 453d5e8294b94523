//! A decode step allocates nothing for the computation, whatever the model's size: only its batch and its answer.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{demo, feed};
use lily_model::backend::{Backend, Batch, Segment, Tokens, Want};
use lily_model::sample::SampleParams;

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the rules of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the rules of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the rules of `realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_decode_step_allocates_nothing_for_the_computation() {
    let mut backend = demo(false).backend();
    let seq = backend.create(256).unwrap();
    feed(&mut backend, seq, 0, &[1, 2, 3]);
    let params = std::sync::Arc::new(SampleParams::greedy());
    let mut counts = Vec::new();
    for i in 0..40 {
        let tokens = if i == 0 { Tokens::Ids(vec![4]) } else { Tokens::LastSampled };
        let segment = Segment { seq, start: 3 + i, tokens, want: Want::Sample(params.clone()) };
        let batch = Batch { segments: vec![segment] };
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let ticket = backend.forward(&batch).unwrap();
        let answer = backend.wait(ticket).unwrap();
        counts.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
        drop(answer);
    }
    println!("{counts:?}");
    // The first steps find the sizes of their buffers.
    assert!(counts[10..].iter().all(|&n| n <= 6), "{counts:?}");
}

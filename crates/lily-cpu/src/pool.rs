//! The threads of a backend. A decoded token takes hundreds of parallel loops of some microseconds each, so
//! threads that have nothing to do stay awake for a while before they sleep, and starting a loop takes no lock.
//!
//! Items are claimed one by one: a thread on a slow core, or one that shares its core with a busy neighbour,
//! simply claims fewer (docs/decisions/0008-claimed-rows.md).

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// How often an idle thread looks for work before it sleeps: about 100 microseconds, which is longer than what
/// lies between two loops of a step.
const LOOKS: usize = 4000;

/// A fixed set of threads that run one parallel loop at a time; the calling thread is one of them.
pub struct Pool {
    shared: Arc<Shared>,
    /// The other threads.
    workers: Vec<JoinHandle<()>>,
}

/// A loop's body, behind a pointer whose lifetime [`Pool::run`] guards.
type Body = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts up when a loop opens (to an odd number) and when it closes.
    generation: AtomicUsize,
    /// Workers that may be looking at `job`.
    inside: AtomicUsize,
    /// The next item that nobody has claimed.
    next: AtomicUsize,
    job: UnsafeCell<Option<(Body, usize)>>,
    /// Set while a loop runs.
    busy: AtomicBool,
    stop: AtomicBool,
    /// Which workers sleep.
    asleep: Vec<AtomicBool>,
    /// What a body panicked with, on another thread than the caller's.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the one thread that has set `busy`, while `generation` is even and nobody is inside.
// It is read between an increment and a decrement of `inside`, after `generation` was seen to be odd.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is to something `Sync`, and used as `Sync` above says.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `threads - 1` threads beside the caller's.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let others = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            generation: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (0..others).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(others) };
        for i in 0..others {
            let shared = Arc::clone(&pool.shared);
            let name = format!("lily-cpu-{}", i + 1);
            pool.workers.push(thread::Builder::new().name(name).spawn(move || shared.serve(i))?);
        }
        Ok(pool)
    }

    /// Threads, the caller's among them.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body` with every number below `items`, each once, on all threads; returns when all calls have. A
    /// loop inside a loop runs on the thread that starts it. A panic of `body` is passed on.
    pub fn run(&self, items: usize, body: impl Fn(usize) + Sync) {
        let shared = &*self.shared;
        if self.workers.is_empty() || items < 2 || shared.busy.swap(true, Ordering::Acquire) {
            return (0..items).for_each(body);
        }
        let body: &(dyn Fn(usize) + Sync) = &body;
        // SAFETY: only the lifetime changes. No worker looks at `job` behind `shared.close()`, which comes before
        // `body` ends, also when it panics here.
        let body: Body = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Body>(body) };
        // SAFETY: `busy` was not set, so the last loop was closed and nobody is inside.
        unsafe { *shared.job.get() = Some((body, items)) };
        shared.next.store(0, Ordering::Relaxed);
        shared.generation.fetch_add(1, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        // SAFETY: `body` is alive.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { shared.claim(body, items) }));
        shared.close();
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.busy.store(false, Ordering::Release);
        if let Some(panic) = result.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Calls `body` with the index and the values of every piece of `size` values; the last may be shorter.
    pub fn chunks<T: Send>(&self, data: &mut [T], size: usize, body: impl Fn(usize, &mut [T]) + Sync) {
        let len = data.len();
        let data = Disjoint::new(data);
        self.run(len.div_ceil(size), |i| {
            // SAFETY: each piece belongs to one item.
            let piece = unsafe { data.slice(i * size, size.min(len - i * size)) };
            body(i, piece);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of bodies; there is no other.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// A worker's life.
    fn serve(&self, me: usize) {
        let mut last = 0;
        while let Some(generation) = self.wait(last, &self.asleep[me]) {
            // The caller closes a loop before it reads `inside`; here it is the other way round. So either the
            // generation is still open and the caller will wait, or this worker stays out.
            self.inside.fetch_add(1, Ordering::SeqCst);
            if self.generation.load(Ordering::SeqCst) == generation {
                // SAFETY: the generation is open, see `Sync`.
                let job = unsafe { *self.job.get() };
                if let Some((body, items)) = job {
                    // SAFETY: the caller waits until nobody is inside before `body` ends.
                    let work = || unsafe { self.claim(body, items) };
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
                        *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                    }
                }
            }
            self.inside.fetch_sub(1, Ordering::Release);
            last = generation;
        }
    }

    /// Waits for a loop other than `last` to open, awake at first; `None` at the end.
    fn wait(&self, last: usize, asleep: &AtomicBool) -> Option<usize> {
        let look = || {
            let generation = self.generation.load(Ordering::SeqCst);
            (generation % 2 == 1 && generation != last).then_some(generation)
        };
        for _ in 0..LOOKS {
            if let Some(generation) = look() {
                return Some(generation);
            }
            spin_loop();
        }
        asleep.store(true, Ordering::SeqCst);
        let found = loop {
            // Looked at after `asleep` was set: whoever opens a loop later sees it and wakes this thread.
            match look() {
                Some(generation) => break Some(generation),
                None if self.stop.load(Ordering::SeqCst) => break None,
                None => thread::park(),
            }
        };
        asleep.store(false, Ordering::SeqCst);
        found
    }

    /// Runs items until none is left.
    ///
    /// # Safety
    /// `body` must be alive.
    unsafe fn claim(&self, body: Body, items: usize) {
        // SAFETY: the caller vouches for it.
        let body = unsafe { &*body };
        loop {
            let item = self.next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            body(item);
        }
    }

    /// Ends the loop: nobody claims from here on, and nobody looks at the job any more.
    fn close(&self) {
        self.next.store(usize::MAX / 2, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::SeqCst);
        let mut looks = 0;
        while self.inside.load(Ordering::SeqCst) != 0 {
            looks += 1;
            // A worker that lost its core half way needs it back.
            if looks % LOOKS == 0 { thread::yield_now() } else { spin_loop() }
        }
    }
}

/// A slice whose parts are written by different threads.
pub struct Disjoint<'a, T> {
    first: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it only gives out parts that don't overlap, as `slice` demands.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice over.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// `len` values from `start` on.
    ///
    /// # Safety
    /// No two parts that are in use at the same time may overlap.
    #[allow(clippy::mut_from_ref, reason = "that is its purpose; the caller keeps parts apart")]
    pub unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: within the slice, by the check above; no overlap, by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_item_runs_once_in_every_loop() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap_or_else(|e| panic!("{e}"));
            for items in (0..200).chain([1000; 200]) {
                let seen: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.run(items, |i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    seen.iter().all(|n| n.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {items} items"
                );
            }
        }
    }

    #[test]
    fn threads_that_fell_asleep_wake_up() {
        let pool = Pool::new(3).unwrap_or_else(|e| panic!("{e}"));
        let sum = AtomicU64::new(0);
        for _ in 0..5 {
            thread::sleep(std::time::Duration::from_millis(20));
            pool.run(50, |i| {
                sum.fetch_add(i as u64, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 5 * 49 * 50 / 2);
    }

    #[test]
    fn a_loop_inside_a_loop_and_chunks() {
        let pool = Pool::new(2).unwrap_or_else(|e| panic!("{e}"));
        let mut data = vec![0u32; 1003];
        pool.chunks(&mut data, 10, |i, piece| {
            let count = AtomicUsize::new(0);
            pool.run(7, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            piece.fill(i as u32 + count.load(Ordering::Relaxed) as u32);
        });
        assert!(data.iter().enumerate().all(|(i, x)| *x as usize == i / 10 + 7));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap_or_else(|e| panic!("{e}"));
        for bad in [0, 17, 99] {
            let run = || pool.run(100, |i| assert_ne!(i, bad, "as planned"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(100, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }
}

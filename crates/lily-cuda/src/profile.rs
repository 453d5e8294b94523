//! Times of single kernels, taken with events around each: they include what the edges between kernels cost when
//! nothing overlaps, so their sum is more than a step takes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::driver::{Context, DriverError, Event};

/// Sums by kernel.
pub struct Probe {
    events: (Event, Event),
    seen: RefCell<BTreeMap<&'static str, (u32, f32)>>,
}

impl Probe {
    /// Nothing seen yet.
    pub fn new(context: &Arc<Context>) -> Result<Self, DriverError> {
        Ok(Self { events: (Event::new(context)?, Event::new(context)?), seen: RefCell::default() })
    }

    /// Runs one launch and waits for it.
    pub fn around(
        &self,
        name: &'static str,
        launch: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let (begin, end) = &self.events;
        begin.record()?;
        launch()?;
        end.record()?;
        end.wait()?;
        let ms = end.since(begin)?;
        let mut seen = self.seen.borrow_mut();
        let entry = seen.entry(name).or_default();
        *entry = (entry.0 + 1, entry.1 + ms * 1e3);
        Ok(())
    }

    /// Launches and microseconds by kernel.
    pub fn result(&self) -> Vec<(&'static str, u32, f32)> {
        self.seen.borrow().iter().map(|(name, (n, us))| (*name, *n, *us)).collect()
    }
}

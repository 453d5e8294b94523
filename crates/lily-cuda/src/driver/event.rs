//! Points in the stream.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, DriverError, check};

/// A point in the stream.
pub struct Event {
    event: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Event {}

impl Event {
    /// An event that keeps time.
    pub fn new(context: &Arc<Context>) -> Result<Self, DriverError> {
        context.handles()?;
        let mut event = ptr::null_mut();
        // SAFETY: the out-pointer is valid.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, 0) })?;
        Ok(Self { event, context: context.clone() })
    }

    /// Marks the end of what was enqueued so far.
    pub fn record(&self) -> Result<(), DriverError> {
        // SAFETY: event and stream are valid.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.context.handles()?.stream) })
    }

    /// Waits until the device has come there.
    pub fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is valid.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }

    /// Milliseconds from `earlier` to here; both must be over.
    pub fn since(&self, earlier: &Self) -> Result<f32, DriverError> {
        let mut ms = 0.0;
        // SAFETY: the out-pointer and both events are valid.
        check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime(&mut ms, earlier.event, self.event) })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}

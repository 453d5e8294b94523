//! Encodes a submission into a command buffer.

use std::ptr::NonNull;

use objc2::runtime::ProtocolObject;
use objc2_foundation::NSRange;
use objc2_metal::{
    MTLBarrierScope, MTLBlitCommandEncoder, MTLCommandBuffer, MTLCommandEncoder, MTLComputeCommandEncoder,
    MTLDispatchType, MTLFence, MTLSize,
};

use super::pipelines::Kernel;
use super::{Buffer, Object, missing};
use crate::device::{Argument, DeviceError, Dispatch, Encoder, Place};

/// The encoder that is open.
enum Open {
    None,
    Compute(Object<dyn MTLComputeCommandEncoder>),
    Blit(Object<dyn MTLBlitCommandEncoder>),
}

/// Encodes kernels into one concurrent compute encoder, as long as no copies come between.
pub struct MetalEncoder<'a> {
    commands: &'a ProtocolObject<dyn MTLCommandBuffer>,
    kernels: &'a [Kernel],
    buffers: &'a [Buffer],
    fence: &'a ProtocolObject<dyn MTLFence>,
    /// Whether something before has updated the fence.
    fenced: bool,
    open: Open,
    failed: Option<DeviceError>,
}

impl<'a> MetalEncoder<'a> {
    /// Nothing yet.
    pub fn new(
        commands: &'a ProtocolObject<dyn MTLCommandBuffer>,
        kernels: &'a [Kernel],
        buffers: &'a [Buffer],
        fence: &'a ProtocolObject<dyn MTLFence>,
        fenced: bool,
    ) -> Self {
        Self { commands, kernels, buffers, fence, fenced, open: Open::None, failed: None }
    }

    /// Ends the encoder that is open.
    pub fn finish(mut self) -> Result<(), DeviceError> {
        self.close();
        self.failed.map_or(Ok(()), Err)
    }

    fn close(&mut self) {
        match std::mem::replace(&mut self.open, Open::None) {
            Open::None => return,
            Open::Compute(encoder) => {
                encoder.updateFence(self.fence);
                encoder.endEncoding();
            }
            Open::Blit(encoder) => {
                encoder.updateFence(self.fence);
                encoder.endEncoding();
            }
        }
        self.fenced = true;
    }

    fn compute(&mut self) -> Option<&ProtocolObject<dyn MTLComputeCommandEncoder>> {
        if !matches!(self.open, Open::Compute(_)) {
            self.close();
            match self.commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent) {
                Some(encoder) => {
                    if self.fenced {
                        encoder.waitForFence(self.fence);
                    }
                    self.open = Open::Compute(encoder);
                }
                None => self.failed = Some(missing("compute encoder")),
            }
        }
        match &self.open {
            Open::Compute(encoder) => Some(encoder),
            _ => None,
        }
    }

    fn blit(&mut self) -> Option<&ProtocolObject<dyn MTLBlitCommandEncoder>> {
        if !matches!(self.open, Open::Blit(_)) {
            self.close();
            match self.commands.blitCommandEncoder() {
                Some(encoder) => {
                    if self.fenced {
                        encoder.waitForFence(self.fence);
                    }
                    self.open = Open::Blit(encoder);
                }
                None => self.failed = Some(missing("blit encoder")),
            }
        }
        match &self.open {
            Open::Blit(encoder) => Some(encoder),
            _ => None,
        }
    }
}

fn size([width, height, depth]: [usize; 3]) -> MTLSize {
    MTLSize { width, height, depth }
}

impl Encoder for MetalEncoder<'_> {
    fn dispatch(&mut self, d: &Dispatch<'_>) {
        let (kernels, buffers) = (self.kernels, self.buffers);
        let Some(encoder) = self.compute() else { return };
        if d.barrier {
            encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
        }
        encoder.setComputePipelineState(&kernels[d.kernel.0 as usize].state);
        for (index, argument) in d.arguments.iter().enumerate() {
            match argument {
                Argument::Place(place) => {
                    let buffer = &buffers[place.buffer.0 as usize].metal;
                    // SAFETY: the plan's bindings are those of the kernel's signature, and its offsets and lengths lie inside
                    // of the buffers; tests compare both on any platform.
                    unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), place.offset, index) };
                }
                Argument::Words(words, count) => {
                    // SAFETY: Metal copies the words, which are inside of the array.
                    unsafe { encoder.setBytes_length_atIndex(NonNull::from(words).cast(), 4 * count, index) };
                }
            }
        }
        for (index, &bytes) in d.threadgroup_memory.iter().enumerate() {
            // SAFETY: as above, of the threadgroup memory arguments.
            unsafe { encoder.setThreadgroupMemoryLength_atIndex(bytes, index) };
        }
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(d.grid), size([d.threads, 1, 1]));
    }

    fn copy(&mut self, from: Place, to: Place, bytes: usize) {
        let buffers = self.buffers;
        let Some(encoder) = self.blit() else { return };
        let (source, target) = (&buffers[from.buffer.0 as usize].metal, &buffers[to.buffer.0 as usize].metal);
        // SAFETY: both lie inside of their buffers: slots and pages of the state that are in use.
        unsafe {
            encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                source,
                from.offset,
                target,
                to.offset,
                bytes,
            );
        }
    }

    fn zero(&mut self, at: Place, bytes: usize) {
        let buffers = self.buffers;
        let Some(encoder) = self.blit() else { return };
        encoder.fillBuffer_range_value(
            &buffers[at.buffer.0 as usize].metal,
            NSRange::new(at.offset, bytes),
            0,
        );
    }
}

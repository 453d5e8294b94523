//! How much of a kernel runs at a time.

use super::{Context, DriverError, Function, Handles, Shape, check, sys};

impl Context {
    /// Blocks of a kernel that run on a multiprocessor at a time.
    pub fn most_blocks(&self, function: Function, shape: Shape) -> Result<u32, DriverError> {
        let Some(_) = self.handles else { return Ok(2048 / shape.threads) };
        let (mut n, shared) = (0, shape.shared as usize);
        // SAFETY: the out-pointer and the function are valid.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut n, function.0, shape.threads as i32, shared)
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(n as u32)
    }

    /// Clusters of `size` blocks of a kernel that run on the device at a time.
    pub fn most_clusters(&self, function: Function, shape: Shape, size: u32) -> Result<u32, DriverError> {
        // A stand-in knows its multiprocessors, not how they are grouped.
        let Some(Handles { stream, .. }) = self.handles else { return Ok(self.multiprocessors / size) };
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: size, y: 1, z: 1 },
            },
        };
        let config = shape.config(stream, &mut attribute, 1);
        let mut n = 0;
        // SAFETY: the out-pointer, the function and the configuration are valid.
        let result = unsafe { sys::cuOccupancyMaxActiveClusters(&mut n, function.0, &config) };
        check("cuOccupancyMaxActiveClusters", result)?;
        Ok(n as u32)
    }
}

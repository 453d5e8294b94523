//! For Apple GPUs: the kernels in Metal Shading Language ([`source`]), and the list of what a step
//! launches ([`plan`]). Both are the same on every platform, so that they are tested where there is no Mac: the tests compile
//! the kernels as C++ with a header that stands for Metal's (`tests/shim`), and run what the plan says on the CPU.
//!
//! There is no backend yet: what would encode the plan on macOS, and the tensor operations of Metal 4 are not written. See `docs/lab/metal.md`.

pub mod plan;
pub mod rope;
pub mod source;

mod batch;
mod builder;
mod launches;

pub use plan::{Plan, PlanError, plan, plan_step};

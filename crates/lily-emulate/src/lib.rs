//! What the tests of lily-metal and lily-cuda share that run GPU kernels on the CPU, as C++: compiling and loading them, memory that is
//! guarded, fibers for their threads (`runtime/fibers.h`), and texts without one of their statements. What a GPU's threads can do stays
//! with the kernels that do it. For Linux; elsewhere nothing is here.
#![cfg(target_os = "linux")]

pub mod library;
pub mod memory;
pub mod removed;

//! What the model is: its configuration, its files, its text, and the contract a device must keep.
//!
//! * [`config`] reads and validates `config.json`; nothing the mathematics uses is assumed.
//! * [`checkpoint`] opens safetensors shards and refuses anything that doesn't fit; [`weights`] gives every
//!   tensor its place in the model, whichever of the two layouts (Hugging Face, MLX) the files have.
//! * [`tokenizer`], [`template`]: text to ids and back, and the chat form.
//! * [`load`] opens all of it at once, with the sampling defaults of [`generation`].
//! * [`footprint`] counts bytes, [`synth`] writes random checkpoints.
//! * [`backend`] is the contract between the engine and a device, [`sample`] how a token is drawn,
//!   [`states`] the sequences and snapshots of a device, [`pool`] who has which part of its memory.

pub mod backend;
pub mod checkpoint;
pub mod config;
mod fields;
pub mod files;
pub mod footprint;
pub mod generation;
pub mod load;
pub mod manifest;
pub mod matrix;
pub mod pool;
pub mod presets;
pub mod sample;
pub mod states;
pub mod synth;
pub mod template;
pub mod tokenizer;
pub mod weights;

//! Where a plan's weights lie: in the mapped files, or in a copy if they can't be read there.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use lily_model::files::{Bytes, Mapping};
use lily_model::matrix::{FloatType, Floats, Form, Matrix};
use lily_model::weights::{Attention, Expert, Gdn, Layer, Mixer, Moe, Weights};

use crate::device::{BufferId, Device, Place};
use crate::plan::{Contents, Plan};
use crate::{LoadError, aligned};

/// What a weight begins at a multiple of that was copied.
const ALIGNMENT: usize = 256;
/// What the kernels need codes to begin at a multiple of, and scales and biases.
const CODES: usize = 4;
const FLOATS: usize = 2;
/// Bytes of an allocation that holds copies, at least if there are so many.
const ARENA: usize = 64 << 20;

/// What a plan's weights are bound to.
pub struct PlacedWeights {
    /// By what they are.
    pub places: HashMap<Contents, Place>,
    /// All memory that holds weights.
    pub buffers: Vec<BufferId>,
    /// Bytes used in mapped files.
    pub mapped: u64,
    /// Bytes that were copied.
    pub copied: u64,
}

/// A weight before it has a place.
enum Source<'a> {
    /// Parts, one for each matrix, and what the kernels need their beginning to be a multiple of.
    Parts(Vec<&'a Bytes>, usize),
    /// Values that kernels read as f32.
    Vector(&'a [f32]),
}

/// Bytes that lie together in a mapped file.
struct Span<'a> {
    index: usize,
    mapping: Mapping<'a>,
    bytes: usize,
    alignment: usize,
}

/// Gives every weight of a plan its place. Vectors are copied, as f32. Matrices stay in their files. A file whose tensors are not
/// aligned as the kernels read them gets an aligned copy beside it, if `aligned_copies` and the folder allow it; what can't be
/// mapped is copied to memory.
pub fn place(
    device: &mut dyn Device,
    weights: &Weights,
    plan: &Plan,
    aligned_copies: bool,
) -> Result<PlacedWeights, LoadError> {
    let mut out = PlacedWeights { places: HashMap::new(), buffers: Vec::new(), mapped: 0, copied: 0 };
    let (mut files, mut copies) = (BTreeMap::<PathBuf, Vec<Span<'_>>>::new(), Vec::new());
    let mut sources = Vec::new();
    for (index, buffer) in plan.buffers.iter().enumerate() {
        let Some(source) = source(weights, &buffer.contents)? else { continue };
        let found = source.bytes();
        if found != buffer.bytes {
            return Err(LoadError::Size { contents: buffer.contents.name(), expected: buffer.bytes, found });
        }
        sources.push((index, source));
    }
    for (index, source) in &sources {
        match source.span(*index) {
            Some(span) => files.entry(span.mapping.path.to_owned()).or_default().push(span),
            None => copies.push(*index),
        }
    }
    for spans in files.values() {
        match view(device, spans, aligned_copies)? {
            Some((buffer, offsets)) => {
                out.buffers.push(buffer);
                for (span, offset) in spans.iter().zip(offsets) {
                    out.places.insert(plan.buffers[span.index].contents.clone(), Place { buffer, offset });
                    out.mapped += span.bytes as u64;
                }
            }
            None => copies.extend(spans.iter().map(|span| span.index)),
        }
    }
    sources.retain(|(index, _)| copies.contains(index));
    copy(device, plan, &sources, &mut out)?;
    Ok(out)
}

/// A mapped file, or its aligned copy, as memory of the device, and where in it its tensors are; `None`: it can't be used so.
fn view(
    device: &mut dyn Device,
    spans: &[Span<'_>],
    aligned_copies: bool,
) -> Result<Option<(BufferId, Vec<usize>)>, LoadError> {
    let Some(Span { mapping, .. }) = spans.first() else { return Ok(None) };
    let path = mapping.path.display();
    let (page, largest) = (device.info().page, device.info().max_buffer);
    let fits = |file: &Bytes| file.len().next_multiple_of(page) <= largest;
    let offsets: Vec<usize> = spans.iter().map(|s| s.mapping.offset).collect();
    let aligned = spans.iter().all(|s| s.mapping.offset.is_multiple_of(s.alignment));
    if aligned && fits(&mapping.file) {
        return Ok(Some((device.map(&mapping.file)?, offsets)));
    }
    if aligned {
        tracing::warn!(
            "{path} is larger than a buffer can be here, {largest} bytes: it is copied to memory at every start"
        );
        return Ok(None);
    }
    let why = if aligned_copies {
        let tensors: Vec<_> = spans.iter().map(|s| s.mapping.offset..s.mapping.offset + s.bytes).collect();
        match aligned::copy(mapping.path, &mapping.file, &tensors) {
            Ok(copy) if fits(&copy.file) => return Ok(Some((device.map(&copy.file)?, copy.offsets))),
            Ok(_) => format!("its aligned copy is larger than a buffer can be here, {largest} bytes"),
            Err(error) => format!("an aligned copy can't be kept ({error})"),
        }
    } else {
        "no aligned copy is wanted".to_owned()
    };
    tracing::warn!("{path} has tensors at odd places, and {why}: it is copied to memory at every start");
    Ok(None)
}

/// Copies weights into as few allocations as [`ARENA`] allows.
fn copy(
    device: &mut dyn Device,
    plan: &Plan,
    copies: &[(usize, Source<'_>)],
    out: &mut PlacedWeights,
) -> Result<(), LoadError> {
    let mut rest = copies;
    while !rest.is_empty() {
        let mut size = 0;
        let fits = |(_, source): &&(usize, Source<'_>)| {
            let first = size == 0;
            size += source.bytes().next_multiple_of(ALIGNMENT);
            first || size <= ARENA
        };
        let (now, later) = rest.split_at(rest.iter().take_while(fits).count());
        rest = later;
        let bytes = now.iter().map(|(_, source)| source.bytes().next_multiple_of(ALIGNMENT)).sum();
        let buffer = device.allocate(bytes, "copied weights")?;
        out.buffers.push(buffer);
        out.copied += bytes as u64;
        let mut at = Place { buffer, offset: 0 };
        for (index, source) in now {
            source.write(device, at);
            out.places.insert(plan.buffers[*index].contents.clone(), at);
            at = at.after(source.bytes().next_multiple_of(ALIGNMENT));
        }
    }
    Ok(())
}

impl<'a> Source<'a> {
    fn bytes(&self) -> usize {
        match self {
            Self::Parts(parts, _) => parts.iter().map(|part| part.len()).sum(),
            Self::Vector(values) => 4 * values.len(),
        }
    }

    /// Where it is in a mapped file, if its parts lie there one behind the other.
    fn span(&self, index: usize) -> Option<Span<'a>> {
        let Self::Parts(parts, alignment) = self else { return None };
        let mapping = parts.first()?.mapping()?;
        let mut end = mapping.offset;
        for part in parts {
            let other = part.mapping()?;
            if other.path != mapping.path || other.offset != end {
                return None;
            }
            end += part.len();
        }
        let bytes = end - mapping.offset;
        Some(Span { index, mapping, bytes, alignment: *alignment })
    }

    fn write(&self, device: &mut dyn Device, at: Place) {
        match self {
            Self::Parts(parts, _) => {
                let mut at = at;
                for part in parts {
                    device.write(at, part);
                    at = at.after(part.len());
                }
            }
            Self::Vector(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                device.write(at, &bytes);
            }
        }
    }
}

/// Where a weight comes from; `None`: these contents are no weight.
fn source<'a>(weights: &'a Weights, contents: &Contents) -> Result<Option<Source<'a>>, LoadError> {
    let missing = || LoadError::Missing { contents: contents.name() };
    Ok(Some(match contents {
        Contents::Vector(name) => Source::Vector(vector(weights, name).ok_or_else(missing)?),
        Contents::Codes(name) => codes(name, matrices(weights, name).ok_or_else(missing)?)?,
        Contents::Scales(name) => {
            Source::Parts(bf16_parts(weights, name, |form| form.1)?.ok_or_else(missing)?, FLOATS)
        }
        Contents::Biases(name) => {
            Source::Parts(bf16_parts(weights, name, |form| form.2)?.ok_or_else(missing)?, FLOATS)
        }
        _ => return Ok(None),
    }))
}

/// The codes of matrices, or their values.
fn codes<'a>(name: &str, matrices: Vec<&'a Matrix>) -> Result<Source<'a>, LoadError> {
    let mut alignment = CODES;
    let mut part = |matrix: &'a Matrix| match &matrix.form {
        Form::Affine { codes, .. } => Ok(codes),
        Form::Dense(values) => {
            alignment = FLOATS;
            bf16(name, values)
        }
    };
    let parts = matrices.into_iter().map(&mut part).collect::<Result<_, _>>()?;
    Ok(Source::Parts(parts, alignment))
}

/// The bytes of floats, which the kernels read as bf16.
fn bf16<'a>(name: &str, floats: &'a Floats) -> Result<&'a Bytes, LoadError> {
    match floats.dtype {
        FloatType::Bf16 => Ok(&floats.data),
        found => Err(LoadError::Floats { module: name.to_owned(), found }),
    }
}

/// Codes, scales and biases of a matrix.
type Quantised<'a> = (&'a Bytes, &'a Floats, &'a Floats);

/// A part of each matrix of a module; `None` if it has none, or one is not quantised.
fn parts<'a, T>(
    weights: &'a Weights,
    name: &str,
    part: impl Fn(Quantised<'a>) -> Option<T>,
) -> Option<Vec<T>> {
    let quantised = |matrix: &'a Matrix| match &matrix.form {
        Form::Affine { codes, scales, biases, .. } => part((codes, scales, biases)),
        Form::Dense(_) => None,
    };
    matrices(weights, name)?.into_iter().map(quantised).collect()
}

/// As [`parts`], of scales or biases, which the kernels read as bf16.
fn bf16_parts<'a>(
    weights: &'a Weights,
    name: &str,
    part: impl Fn(Quantised<'a>) -> &'a Floats,
) -> Result<Option<Vec<&'a Bytes>>, LoadError> {
    let Some(floats) = parts(weights, name, |form| Some(part(form))) else { return Ok(None) };
    floats.into_iter().map(|floats| bf16(name, floats)).collect::<Result<_, _>>().map(Some)
}

/// The layer that a module belongs to, and the rest of its name.
fn layer<'a, 'n>(weights: &'a Weights, name: &'n str) -> Option<(&'a Layer, &'n str)> {
    let (index, rest) = name.strip_prefix("layers.")?.split_once('.')?;
    Some((weights.layers.get(index.parse::<usize>().ok()?)?, rest))
}

/// The matrices of a module, named as in [`lily_model::manifest`].
fn matrices<'a>(weights: &'a Weights, name: &str) -> Option<Vec<&'a Matrix>> {
    match name {
        "embed_tokens" => return Some(vec![&weights.embedding]),
        "lm_head" => return Some(vec![&weights.lm_head]),
        _ => {}
    }
    let (layer, rest) = layer(weights, name)?;
    match (rest.split_once('.')?, &layer.mixer) {
        (("linear_attn", name), Mixer::Gdn(gdn)) => gdn_matrix(gdn, name).map(|m| vec![m]),
        (("self_attn", name), Mixer::Attention(attention)) => {
            attention_matrix(attention, name).map(|m| vec![m])
        }
        (("mlp", name), _) => moe_matrices(&layer.moe, name),
        _ => None,
    }
}

fn gdn_matrix<'a>(w: &'a Gdn, name: &str) -> Option<&'a Matrix> {
    Some(match name {
        "in_proj_qkv" => &w.in_proj_qkv,
        "in_proj_z" => &w.in_proj_z,
        "in_proj_b" => &w.in_proj_b,
        "in_proj_a" => &w.in_proj_a,
        "out_proj" => &w.out_proj,
        _ => return None,
    })
}

fn attention_matrix<'a>(w: &'a Attention, name: &str) -> Option<&'a Matrix> {
    Some(match name {
        "q_proj" => &w.q_proj,
        "k_proj" => &w.k_proj,
        "v_proj" => &w.v_proj,
        "o_proj" => &w.o_proj,
        _ => return None,
    })
}

fn moe_matrices<'a>(w: &'a Moe, name: &str) -> Option<Vec<&'a Matrix>> {
    let expert = |expert: &'a Expert, name: &str| {
        Some(match name {
            "gate_proj" => &expert.gate,
            "up_proj" => &expert.up,
            "down_proj" => &expert.down,
            _ => return None,
        })
    };
    match name.split_once('.') {
        None if name == "gate" => Some(vec![&w.router]),
        None if name == "shared_expert_gate" => Some(vec![&w.shared_gate]),
        Some(("switch_mlp", name)) => w.experts.iter().map(|e| expert(e, name)).collect(),
        Some(("shared_expert", name)) => expert(&w.shared, name).map(|m| vec![m]),
        _ => None,
    }
}

/// The values of a module that is a vector.
fn vector<'a>(weights: &'a Weights, name: &str) -> Option<&'a [f32]> {
    if name == "norm" {
        return Some(&weights.norm);
    }
    let (layer, rest) = layer(weights, name)?;
    Some(match (rest, &layer.mixer) {
        ("input_layernorm", _) => &layer.input_norm,
        ("post_attention_layernorm", _) => &layer.post_attention_norm,
        ("linear_attn.conv1d", Mixer::Gdn(w)) => &w.conv,
        ("linear_attn.A_log", Mixer::Gdn(w)) => &w.a_log,
        ("linear_attn.dt_bias", Mixer::Gdn(w)) => &w.dt_bias,
        ("linear_attn.norm", Mixer::Gdn(w)) => &w.norm,
        ("self_attn.q_norm", Mixer::Attention(w)) => &w.q_norm,
        ("self_attn.k_norm", Mixer::Attention(w)) => &w.k_norm,
        _ => return None,
    })
}

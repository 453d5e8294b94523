//! Safetensors shards, opened and checked by their headers alone: no tensor is read here.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;

use crate::files::{Bytes, FileError, ModelFiles};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// Every tensor of a checkpoint, by the name it has in the files.
#[derive(Debug)]
pub struct Checkpoint {
    tensors: BTreeMap<String, Tensor>,
}

/// A tensor in a mapped file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub data: Bytes,
}

/// Why a checkpoint can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file is missing or unreadable.
    #[error(transparent)]
    File(#[from] FileError),
    /// Neither an index nor a single file.
    #[error("{0} holds neither {INDEX} nor {SINGLE}: it is not a checkpoint")]
    NoWeights(String),
    /// The index is not what it should be.
    #[error("{file}: {problem}")]
    Index {
        /// Path of the index.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// The header of a shard is damaged, or its file is shorter or longer than the header says.
    #[error("{file}: {problem}: the file is damaged or incomplete, download it again")]
    Shard {
        /// Path of the shard.
        file: String,
        /// What is wrong: expected and found.
        problem: String,
    },
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens every shard of a model and checks its header against its length, and the index against both.
    pub fn open(files: &ModelFiles) -> Result<Self, CheckpointError> {
        if !files.contains(INDEX) {
            if !files.contains(SINGLE) {
                return Err(CheckpointError::NoWeights(files.describe("")));
            }
            return Ok(Self { tensors: open_shard(files, SINGLE)? });
        }
        let problem = |problem: String| CheckpointError::Index { file: files.describe(INDEX), problem };
        let index: Index =
            serde_json::from_slice(&files.open(INDEX)?).map_err(|e| problem(format!("not an index: {e}")))?;
        let shards: BTreeSet<&String> = index.weight_map.values().collect();
        let mut tensors = BTreeMap::new();
        for &shard in &shards {
            if shard.contains(['/', '\\']) {
                return Err(problem(format!("shard {shard:?} is not the plain name of a file")));
            }
            for (name, tensor) in open_shard(files, shard)? {
                match index.weight_map.get(&name) {
                    Some(home) if home == shard => _ = tensors.insert(name, tensor),
                    Some(home) => {
                        return Err(problem(format!("says tensor {name} is in {home}, but {shard} has it")));
                    }
                    None => return Err(problem(format!("does not list tensor {name}, which {shard} has"))),
                }
            }
        }
        if let Some((name, shard)) = index.weight_map.iter().find(|(name, _)| !tensors.contains_key(*name)) {
            return Err(problem(format!("says tensor {name} is in {shard}, which does not have it")));
        }
        Ok(Self { tensors })
    }

    /// A tensor by its name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Names and tensors, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }
}

fn open_shard(files: &ModelFiles, name: &str) -> Result<BTreeMap<String, Tensor>, CheckpointError> {
    let bytes = files.open(name)?;
    parse(&bytes).map_err(|problem| CheckpointError::Shard { file: files.describe(name), problem })
}

/// Splits a safetensors file: 8 bytes header length, JSON header, data. Checks that the tensors lie in the
/// data, one after the other, each as long as its shape says, and fill it.
fn parse(file: &Bytes) -> Result<BTreeMap<String, Tensor>, String> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(format!("expected at least the 8 bytes of the header's length, found {}", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER || length > rest.len() as u64 {
        return Err(format!(
            "the header claims {length} bytes, the file has {} left (and {MAX_HEADER} is the most allowed)",
            rest.len()
        ));
    }
    let (header, data) = rest.split_at(length as usize);
    let mut header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(header).map_err(|e| format!("the header is not JSON: {e}"))?;
    header.remove("__metadata__");
    let mut tensors = Vec::with_capacity(header.len());
    for (name, value) in header {
        let info: TensorInfo = serde_json::from_value(value).map_err(|e| format!("tensor {name}: {e}"))?;
        tensors.push((name, info));
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0;
    for (name, info) in &tensors {
        let (from, to) = info.data_offsets;
        if to > data.len() {
            let found = data.len();
            return Err(format!(
                "tensor {name} is said to lie at {from}..{to} of the data, which has {found} bytes"
            ));
        }
        if from != end || to < from {
            return Err(format!(
                "tensor {name} is said to lie at {from}..{to} of the data, expected it at {end}"
            ));
        }
        let expected =
            byte_len(info).ok_or_else(|| format!("tensor {name}: the shape {:?} overflows", info.shape))?;
        if to - from != expected {
            let (dtype, shape, found) = (info.dtype, &info.shape, to - from);
            return Err(format!("tensor {name} ({dtype:?} {shape:?}) takes {expected} bytes, found {found}"));
        }
        end = to;
    }
    if end != data.len() {
        return Err(format!("expected {end} bytes of data, found {}", data.len()));
    }
    let start = 8 + length as usize;
    let tensor = |(name, info): (String, TensorInfo)| {
        let (from, to) = info.data_offsets;
        let data = file.slice(start + from..start + to);
        (name, Tensor { dtype: info.dtype, shape: info.shape, data })
    };
    Ok(tensors.into_iter().map(tensor).collect())
}

fn byte_len(info: &TensorInfo) -> Option<usize> {
    let elements = info.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
    let bits = elements.checked_mul(info.dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: usize) -> Bytes {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        Bytes::new(bytes)
    }

    const TWO: &str = r#"{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},"b":{"dtype":"U32","shape":[2,1],"data_offsets":[6,14]}}"#;

    #[test]
    fn a_whole_file_is_split_into_its_tensors() {
        let tensors = parse(&file(TWO, 14)).unwrap();
        assert_eq!(tensors["a"].shape, [3]);
        assert_eq!((tensors["b"].dtype, tensors["b"].data.len()), (Dtype::U32, 8));
    }

    #[test]
    fn damage_is_named() {
        let cases = [
            (file(TWO, 13), "tensor b is said to lie at 6..14 of the data, which has 13 bytes"),
            (file(TWO, 15), "expected 14 bytes of data, found 15"),
            (file(&TWO.replace("[3]", "[4]"), 14), "tensor a (BF16 [4]) takes 8 bytes, found 6"),
            (
                file(&TWO.replace("[6,14]", "[5,14]"), 14),
                "tensor b is said to lie at 5..14 of the data, expected it at 6",
            ),
            (file(&TWO.replace("U32", "Q7"), 14), "tensor b: unknown variant `Q7`"),
            (file(&TWO.replace("[2,1]", "[4611686018427387904,8]"), 14), "overflows"),
            (
                Bytes::new((1u64 << 60).to_le_bytes()),
                "the header claims 1152921504606846976 bytes, the file has 0 left",
            ),
            (Bytes::new([0, 1, 2]), "expected at least the 8 bytes of the header's length, found 3"),
            (file("nonsense", 0), "the header is not JSON"),
        ];
        for (bytes, words) in cases {
            let problem = parse(&bytes).unwrap_err();
            assert!(problem.contains(words), "{problem:?} should say {words:?}");
        }
    }

    proptest! {
        /// Damage anywhere is an error or harmless, never a panic.
        #[test]
        fn any_damage_is_survived(at in 0usize..140, byte: u8, cut in 0usize..160) {
            let mut bytes = file(TWO, 14).to_vec();
            let n = bytes.len();
            bytes[at % n] = byte;
            bytes.truncate(cut.max(1));
            let _ = parse(&Bytes::new(bytes));
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&Bytes::new(bytes));
        }
    }
}

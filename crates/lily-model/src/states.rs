//! Sequences and snapshots of a backend, by the ids that it gives out.

use std::collections::HashMap;

use crate::backend::{BackendError, SeqId, SnapshotId};

/// What a backend knows of each sequence and each snapshot: an `S`.
pub struct States<S> {
    sequences: HashMap<SeqId, S>,
    snapshots: HashMap<SnapshotId, S>,
    last_id: u64,
}

impl<S> Default for States<S> {
    fn default() -> Self {
        Self { sequences: HashMap::new(), snapshots: HashMap::new(), last_id: 0 }
    }
}

impl<S> States<S> {
    /// A number that was never given out, for a ticket.
    pub fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Adds a sequence.
    pub fn add_sequence(&mut self, state: S) -> SeqId {
        let id = SeqId(self.new_id());
        self.sequences.insert(id, state);
        id
    }

    /// Adds a snapshot.
    pub fn add_snapshot(&mut self, state: S) -> SnapshotId {
        let id = SnapshotId(self.new_id());
        self.snapshots.insert(id, state);
        id
    }

    /// A sequence; [`BackendError::Unknown`]: there is none.
    pub fn sequence(&self, id: SeqId) -> Result<&S, BackendError> {
        self.sequences.get(&id).ok_or_else(|| unknown_sequence(id))
    }

    /// As [`States::sequence`].
    pub fn sequence_mut(&mut self, id: SeqId) -> Result<&mut S, BackendError> {
        self.sequences.get_mut(&id).ok_or_else(|| unknown_sequence(id))
    }

    /// A snapshot; [`BackendError::Unknown`]: there is none.
    pub fn snapshot(&self, id: SnapshotId) -> Result<&S, BackendError> {
        self.snapshots.get(&id).ok_or_else(|| unknown_snapshot(id))
    }

    /// Takes a sequence out; [`BackendError::Unknown`]: there is none.
    pub fn remove_sequence(&mut self, id: SeqId) -> Result<S, BackendError> {
        self.sequences.remove(&id).ok_or_else(|| unknown_sequence(id))
    }

    /// Takes a snapshot out; [`BackendError::Unknown`]: there is none.
    pub fn remove_snapshot(&mut self, id: SnapshotId) -> Result<S, BackendError> {
        self.snapshots.remove(&id).ok_or_else(|| unknown_snapshot(id))
    }

    /// Puts a sequence back that was taken out, by its id.
    pub fn put_back(&mut self, id: SeqId, state: S) {
        self.sequences.insert(id, state);
    }
}

fn unknown_sequence(SeqId(id): SeqId) -> BackendError {
    BackendError::Unknown { kind: "sequence", id }
}

fn unknown_snapshot(SnapshotId(id): SnapshotId) -> BackendError {
    BackendError::Unknown { kind: "snapshot", id }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_given_out_once() {
        let mut states = States::default();
        let sequence = states.add_sequence("a");
        let snapshot = states.add_snapshot("b");
        let other = states.add_sequence("c");
        let ids = [sequence.0, snapshot.0, other.0, states.new_id()];
        assert_eq!(ids, [1, 2, 3, 4]);
        assert_eq!((states.sequence(sequence), states.snapshot(snapshot)), (Ok(&"a"), Ok(&"b")));
        assert_eq!(states.remove_sequence(other), Ok("c"));
        assert_eq!(states.add_sequence("d"), SeqId(5));
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        let mut states = States::default();
        let (sequence, snapshot) = (states.add_sequence(1), states.add_snapshot(2));
        let missing = |kind, id| Err(BackendError::Unknown { kind, id });
        // An id of the one is none of the other.
        assert_eq!(states.snapshot(SnapshotId(sequence.0)), missing("snapshot", 1).map(|(): ()| &0));
        assert_eq!(states.sequence(SeqId(snapshot.0)), missing("sequence", 2).map(|(): ()| &0));
        let taken = states.remove_sequence(sequence).unwrap();
        assert_eq!(states.remove_sequence(sequence), missing("sequence", 1).map(|(): ()| 0));
        states.put_back(sequence, taken + 1);
        *states.sequence_mut(sequence).unwrap() += 1;
        assert_eq!(states.sequence(sequence), Ok(&3));
        assert_eq!(states.remove_snapshot(snapshot), Ok(2));
        assert_eq!(states.remove_snapshot(snapshot), missing("snapshot", 2).map(|(): ()| 0));
    }
}

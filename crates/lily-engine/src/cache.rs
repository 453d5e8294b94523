//! The prefix cache: snapshots of what was read, so that it need not be read again.
//!
//! A snapshot holds the whole state after some tokens, K/V and recurrent state together, under exactly these
//! tokens; it serves every prompt that starts with them. Recurrent state can't be cut back, so a prompt resumes
//! at a snapshot or is read from its beginning, never from somewhere between.
//!
//! Two bounds hold. The cache itself keeps to its limit: the least recently used snapshots go. And it only has
//! what requests leave: for one that finds no memory, snapshots go until it does.

mod prefixes;

use lily_model::backend::{Backend, BackendError, SeqId, SnapshotId};

use prefixes::Prefixes;

/// Snapshots of a backend. All calls must be given the same backend.
#[derive(Debug)]
pub(crate) struct Cache {
    prefixes: Prefixes,
    /// Bytes of state that snapshots may keep from being free.
    limit: u64,
}

impl Cache {
    /// A cache of at most `limit` bytes of state; with 0 there is none.
    pub fn new(limit: u64) -> Self {
        Self { prefixes: Prefixes::default(), limit }
    }

    /// Whether it can hold anything.
    pub fn is_on(&self) -> bool {
        self.limit > 0
    }

    /// Snapshots in it.
    pub fn len(&self) -> usize {
        self.prefixes.len()
    }

    /// Bytes of state that are reserved for neither of the running sequences, which reserve `running` bytes:
    /// those that snapshots hold on to.
    pub fn bytes(backend: &dyn Backend, running: u64) -> u64 {
        let reserved = backend.limits().state_budget.saturating_sub(backend.free_bytes());
        reserved.saturating_sub(running)
    }

    /// Starts a sequence behind the longest prefix of `tokens` that there is a snapshot of, and gives how long
    /// that is. Where memory is short, snapshots go until it suffices: that one last.
    pub fn open(
        &mut self,
        backend: &mut dyn Backend,
        tokens: &[u32],
        capacity: u32,
    ) -> Result<(SeqId, u32), BackendError> {
        loop {
            let hit = self.prefixes.deepest(tokens);
            let (cached, opened) = match hit {
                Some((length, snapshot)) => (length, backend.resume(snapshot, capacity)),
                None => (0, backend.create(capacity)),
            };
            match opened {
                Err(error @ BackendError::OutOfMemory { .. }) => {
                    let evicted = self.prefixes.evict(&tokens[..cached]);
                    let Some(evicted) = evicted.or_else(|| self.prefixes.evict(&[])) else {
                        return Err(error);
                    };
                    backend.forget(evicted)?;
                }
                Err(error) => return Err(error),
                Ok(seq) => {
                    self.prefixes.touch(tokens);
                    return Ok((seq, cached as u32));
                }
            }
        }
    }

    /// Length of the longest prefix of `tokens` that there is a snapshot of.
    pub fn reach(&self, tokens: &[u32]) -> usize {
        self.prefixes.deepest(tokens).map_or(0, |(length, _)| length)
    }

    /// Takes a snapshot of a sequence that has read `tokens`, unless there is one or no room can be made for it.
    /// The one of `spare` does not go to make room. `running` is as in [`Cache::bytes`].
    ///
    /// What is returned is not in the cache yet: [`Cache::insert`] it when it is known to be sound.
    pub fn snapshot(
        &mut self,
        backend: &mut dyn Backend,
        seq: SeqId,
        tokens: &[u32],
        spare: &[u32],
        running: u64,
    ) -> Result<Option<SnapshotId>, BackendError> {
        // Larger on its own than all that there may be, it would drive out everything, and then itself.
        let too_large = backend.state_bytes(tokens.len() as u32) > self.limit;
        if too_large || tokens.is_empty() || self.prefixes.contains(tokens) {
            return Ok(None);
        }
        let snapshot = loop {
            match backend.snapshot(seq) {
                Err(BackendError::OutOfMemory { .. }) => match self.prefixes.evict(spare) {
                    Some(evicted) => backend.forget(evicted)?,
                    None => return Ok(None),
                },
                taken => break taken?,
            }
        };
        if self.shrink(backend, spare, running)? {
            return Ok(Some(snapshot));
        }
        backend.forget(snapshot)?;
        Ok(None)
    }

    /// Adds a snapshot taken after `tokens`.
    pub fn insert(
        &mut self,
        backend: &mut dyn Backend,
        tokens: &[u32],
        snapshot: SnapshotId,
    ) -> Result<(), BackendError> {
        self.prefixes.insert(tokens, snapshot).map_or(Ok(()), |replaced| backend.forget(replaced))
    }

    /// Brings the cache down to its limit, if that can be had without the snapshot of `spare`; gives whether.
    pub fn shrink(
        &mut self,
        backend: &mut dyn Backend,
        spare: &[u32],
        running: u64,
    ) -> Result<bool, BackendError> {
        while Self::bytes(backend, running) > self.limit {
            let Some(evicted) = self.prefixes.evict(spare) else { return Ok(false) };
            backend.forget(evicted)?;
        }
        Ok(true)
    }

    /// Forgets everything on the way to `tokens`, whose state has turned out to be broken.
    pub fn distrust(&mut self, backend: &mut dyn Backend, tokens: &[u32]) -> Result<(), BackendError> {
        self.prefixes.remove_path(tokens).into_iter().try_for_each(|snapshot| backend.forget(snapshot))
    }

    /// Forgets everything.
    pub fn clear(&mut self, backend: &mut dyn Backend) -> Result<(), BackendError> {
        while let Some(snapshot) = self.prefixes.evict(&[]) {
            backend.forget(snapshot)?;
        }
        Ok(())
    }
}

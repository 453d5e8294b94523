//! Finds the snapshot that goes furthest along a prompt.
//!
//! A sorted map does what a radix tree would. In lexicographic order the prefixes of a prompt come before it, and
//! whatever lies between a prefix and the prompt starts with that prefix. So the entry just before a prompt is
//! its deepest prefix, or shows by what it shares with the prompt how long that one can be at most. Each entry
//! keeps its tokens in full: 4 bytes a token, where the state that the entry stands for takes thousands.

use std::collections::BTreeMap;
use std::ops::Bound;

use lily_model::backend::SnapshotId;

/// Snapshots by the tokens that were read when they were taken, with the order of their last use.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    entries: BTreeMap<Vec<u32>, Entry>,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    snapshot: SnapshotId,
    /// Time of the last use; no two are the same.
    used: u64,
}

impl Prefixes {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn contains(&self, tokens: &[u32]) -> bool {
        self.entries.contains_key(tokens)
    }

    /// The longest entry that `tokens` starts with: its length and its snapshot.
    pub fn deepest(&self, tokens: &[u32]) -> Option<(usize, SnapshotId)> {
        let mut candidate = tokens;
        loop {
            let up_to = (Bound::Unbounded, Bound::Included(candidate));
            let (before, entry) = self.entries.range::<[u32], _>(up_to).next_back()?;
            let shared = before.iter().zip(candidate).take_while(|(a, b)| a == b).count();
            if shared == before.len() {
                return Some((shared, entry.snapshot));
            }
            candidate = &candidate[..shared];
        }
    }

    /// Marks all entries that `tokens` starts with as used: the longest first, so that what more prompts can
    /// share is the last to go.
    pub fn touch(&mut self, tokens: &[u32]) {
        for length in self.path(tokens) {
            self.clock += 1;
            if let Some(entry) = self.entries.get_mut(&tokens[..length]) {
                entry.used = self.clock;
            }
        }
    }

    /// Adds an entry, used just now; gives the snapshot that it takes the place of.
    pub fn insert(&mut self, tokens: &[u32], snapshot: SnapshotId) -> Option<SnapshotId> {
        self.clock += 1;
        let entry = Entry { snapshot, used: self.clock };
        self.entries.insert(tokens.to_vec(), entry).map(|replaced| replaced.snapshot)
    }

    /// Takes out the least recently used entry other than `spare`.
    pub fn evict(&mut self, spare: &[u32]) -> Option<SnapshotId> {
        let may_go = self.entries.iter().filter(|(tokens, _)| tokens.as_slice() != spare);
        let (tokens, _) = may_go.min_by_key(|(_, entry)| entry.used)?;
        let tokens = tokens.clone();
        self.entries.remove(&tokens).map(|entry| entry.snapshot)
    }

    /// Takes out all entries that `tokens` starts with.
    pub fn remove_path(&mut self, tokens: &[u32]) -> Vec<SnapshotId> {
        let lengths = self.path(tokens);
        let removed = lengths.into_iter().filter_map(|length| self.entries.remove(&tokens[..length]));
        removed.map(|entry| entry.snapshot).collect()
    }

    /// Lengths of the entries that `tokens` starts with, the longest first.
    fn path(&self, tokens: &[u32]) -> Vec<usize> {
        let mut lengths = Vec::new();
        let mut rest = Some(tokens);
        while let Some((length, _)) = rest.and_then(|rest| self.deepest(rest)) {
            lengths.push(length);
            rest = length.checked_sub(1).map(|shorter| &tokens[..shorter]);
        }
        lengths
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Act {
        Insert(Vec<u32>),
        Touch(Vec<u32>),
        Evict(Vec<u32>),
        RemovePath(Vec<u32>),
    }

    fn act() -> impl Strategy<Value = Act> {
        // Few tokens, so that sequences often share a beginning.
        let tokens = || prop::collection::vec(0u32..3, 0..7);
        prop_oneof![
            4 => tokens().prop_map(Act::Insert),
            2 => tokens().prop_map(Act::Touch),
            2 => tokens().prop_map(Act::Evict),
            1 => tokens().prop_map(Act::RemovePath),
        ]
    }

    /// The same by searching all of a list, whose order is that of use: the least recent first.
    #[derive(Default)]
    struct Naive(Vec<(Vec<u32>, SnapshotId)>);

    impl Naive {
        fn deepest(&self, tokens: &[u32]) -> Option<(usize, SnapshotId)> {
            let prefixes = self.0.iter().filter(|(key, _)| tokens.starts_with(key));
            prefixes.map(|(key, snapshot)| (key.len(), *snapshot)).max()
        }

        fn take_path(&mut self, tokens: &[u32]) -> Vec<(Vec<u32>, SnapshotId)> {
            let mut path: Vec<_> = self.0.extract_if(.., |(key, _)| tokens.starts_with(key)).collect();
            path.sort_by_key(|(key, _)| std::cmp::Reverse(key.len()));
            path
        }

        fn touch(&mut self, tokens: &[u32]) {
            let path = self.take_path(tokens);
            self.0.extend(path);
        }

        fn insert(&mut self, tokens: &[u32], snapshot: SnapshotId) -> Option<SnapshotId> {
            let replaced = self.0.iter().position(|(key, _)| key == tokens).map(|i| self.0.remove(i).1);
            self.0.push((tokens.to_vec(), snapshot));
            replaced
        }

        fn evict(&mut self, spare: &[u32]) -> Option<SnapshotId> {
            let i = self.0.iter().position(|(key, _)| key != spare)?;
            Some(self.0.remove(i).1)
        }
    }

    proptest! {
        #[test]
        fn it_does_what_searching_a_list_does(
            acts in prop::collection::vec(act(), 0..60),
            asked in prop::collection::vec(prop::collection::vec(0u32..3, 0..9), 0..20),
        ) {
            let (mut prefixes, mut naive) = (Prefixes::default(), Naive::default());
            for (id, act) in (0..).map(SnapshotId).zip(acts) {
                match act {
                    Act::Insert(tokens) => {
                        prop_assert_eq!(prefixes.insert(&tokens, id), naive.insert(&tokens, id));
                    }
                    Act::Touch(tokens) => {
                        prefixes.touch(&tokens);
                        naive.touch(&tokens);
                    }
                    Act::Evict(spare) => prop_assert_eq!(prefixes.evict(&spare), naive.evict(&spare)),
                    Act::RemovePath(tokens) => {
                        let path = naive.take_path(&tokens).into_iter().map(|(_, id)| id).collect::<Vec<_>>();
                        prop_assert_eq!(prefixes.remove_path(&tokens), path);
                    }
                }
                prop_assert_eq!(prefixes.len(), naive.0.len());
                for tokens in &asked {
                    prop_assert_eq!(prefixes.deepest(tokens), naive.deepest(tokens));
                    prop_assert_eq!(prefixes.contains(tokens), naive.0.iter().any(|(key, _)| key == tokens));
                }
            }
            // Everything goes, in the same order.
            while let Some(id) = naive.evict(&[9]) {
                prop_assert_eq!(prefixes.evict(&[9]), Some(id));
            }
        }
    }
}

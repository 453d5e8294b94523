"""Rows of packed documents. A row holds T + 2 tokens (the MTP head looks two ahead), its document numbers and the weight of
each token as a target. Half-filled rows end with a piece of a book, so nothing is padded but the last few tokens."""
import io
import lzma

import numpy as np

MIN_PIECE = 48


class Data:
    def __init__(self, folder):
        z = np.load(io.BytesIO(lzma.decompress((folder / "train.npz.xz").read_bytes())))
        self.tokens, self.group = z["tokens"], z["group"]
        self.learn = np.unpackbits(z["learn"])[:len(self.tokens)]
        self.ends = z["ends"].astype(np.int64)
        self.starts = np.concatenate([[0], self.ends[:-1]])

    def of(self, groups):
        return np.flatnonzero(np.isin(self.group, groups))


class Rows:
    """An endless, seeded stream of rows. State (order, places, generator) pickles, so that training can resume."""

    def __init__(self, data, length, seed):
        self.data, self.length = data, length
        self.rng = np.random.default_rng(seed)
        self.books = data.of([0, 1])                         # chapters and the fact book
        self.order, self.at, self.left = [], 0, (0, 0)
        self.weights, self.chats, self.chat_at = {}, [], 0

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "data"}

    def set_mix(self, weights):
        """How often one pass over the chats holds each document, by group; 1.5 means every second one twice."""
        if weights != self.weights:
            self.weights, self.chats, self.chat_at = weights, [], 0

    def book(self, n):
        """The next n tokens of the current chapter, or fewer up to its end."""
        if self.left[0] >= self.left[1]:
            if self.at >= len(self.order):
                self.order, self.at = self.rng.permutation(self.books), 0
            d = self.order[self.at]
            self.at += 1
            self.left = (int(self.data.starts[d]), int(self.data.ends[d]))
            if self.left[1] - self.left[0] > self.length:    # another cut at every pass
                first = self.left[0] + int(self.rng.integers(0, self.length))
                self.left = (first, self.left[1])
        s = self.left[0]
        e = min(s + n, self.left[1])
        self.left = (e, self.left[1])
        return s, e

    def chat(self):
        if self.chat_at >= len(self.chats):
            self.chats, self.chat_at = [], 0
            for g, w in self.weights.items():
                docs = self.data.of([g])
                take = docs.repeat(int(w))
                part = w - int(w)
                if part:
                    take = np.concatenate([take, self.rng.choice(docs, int(len(docs) * part), replace=False)])
                self.chats.append(take)
            self.chats = self.rng.permutation(np.concatenate(self.chats))
        d = self.chats[self.chat_at]
        return int(self.data.starts[d]), int(self.data.ends[d])

    def row(self, book_share):
        n, pieces = self.length + 2, []
        room = n
        if self.rng.random() >= book_share:
            while True:
                s, e = self.chat()
                if e - s > n:
                    e = s + n                                # longer than a row: its beginning
                if e - s > room:
                    break
                self.chat_at += 1
                pieces.append((s, e))
                room -= e - s
                if room < MIN_PIECE:
                    break
        while room >= MIN_PIECE:
            s, e = self.book(room)
            pieces.append((s, e))
            room -= e - s
        tokens, ids, weight = np.zeros(n, np.int64), np.full(n, len(pieces), np.int32), np.zeros(n, np.float32)
        at = 0
        for i, (s, e) in enumerate(pieces):
            tokens[at:at + e - s] = self.data.tokens[s:e]
            weight[at:at + e - s] = self.data.learn[s:e]
            ids[at:at + e - s] = i
            at += e - s
        return tokens, ids, weight

    def batch(self, rows, book_share):
        return [np.stack(x) for x in zip(*(self.row(book_share) for _ in range(rows)))]


def held_out(data, groups, length, rows):
    """The first `rows` rows of the held-out documents of these groups, packed in their order."""
    out, n = [], length + 2
    tokens, ids, weight, at, k = None, None, None, n, 0
    for d in data.of([g + 100 for g in groups]):
        s = int(data.starts[d])
        while s < data.ends[d]:
            e = min(int(data.ends[d]), s + length)
            if at + min(e - s, 256) > n:
                if len(out) == rows:
                    return [np.stack(x) for x in zip(*out)]
                tokens, ids, weight, at, k = np.zeros(n, np.int64), np.full(n, -1, np.int32), np.zeros(n, np.float32), 0, 0
                out.append((tokens, ids, weight))
            e = min(e, s + n - at)
            tokens[at:at + e - s], ids[at:at + e - s], weight[at:at + e - s] = data.tokens[s:e], k, data.learn[s:e]
            at, k, s = at + e - s, k + 1, e
    blank = (np.zeros(n, np.int64), np.full(n, -1, np.int32), np.zeros(n, np.float32))
    return [np.stack(x) for x in zip(*(out + [blank] * (rows - len(out))))]

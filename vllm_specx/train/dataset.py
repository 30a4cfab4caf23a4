"""Training text with its hidden states: windows to train on, greedy runs to validate with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.train import shards
from vllm_specx.train.errors import TrainError
from vllm_specx.train.generate import GREEDY
from vllm_specx.train.generate import KIND as TEXT
from vllm_specx.train.hidden import AUX, LAST, require_text

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Consecutive positions of several conversations, end to end.

    hidden: [T, hidden] bfloat16, the state after position t has been read.
    tokens: int64 [T]; source: uint8 [T] (generate.py); end: int64 [T], where t's stretch ends.
    starts: int64 [P], positions that drafts may start from.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    source: torch.Tensor
    end: torch.Tensor
    starts: torch.Tensor


class Corpus:
    """All shards of a text folder and of its hidden states.

    folder_hidden None reads the text only. Raises TrainError when nothing or not all is there.
    """

    def __init__(self, text: Path, hidden: Path | None, limit: int | None = None) -> None:
        tokens, source = [], []
        self._hidden: list[npt.NDArray[np.uint16]] = []
        self._folder = hidden
        self._shards: list[int] = []
        self._maps: dict[tuple[str, int], shards.Arrays] = {}
        offsets = [np.zeros(1, np.int64)]
        self._begins = [0]
        for index in shards.indices(text, TEXT):
            try:
                arrays = shards.read_shard(shards.shard_path(text, TEXT, index)).arrays
                if hidden is not None:
                    path = shards.shard_path(hidden, LAST, index)
                    states = shards.read_shard(path, check=False)
                    require_text(states, arrays["tokens"])
                    self._hidden.append(states.arrays["last"])
            except shards.BrokenShard as error:
                raise TrainError(f"{error}; give the same command again to make it anew.") from None
            tokens.append(np.asarray(arrays["tokens"]))
            source.append(np.asarray(arrays["source"]))
            offsets.append(arrays["offsets"][1:] + self._begins[-1])
            self._begins.append(self._begins[-1] + len(tokens[-1]))
            self._shards.append(index)
            if limit is not None and self._begins[-1] >= limit:
                break
        if not tokens:
            raise TrainError(f"there is no training text in {text}.")
        self.tokens: npt.NDArray[np.int32] = np.concatenate(tokens)
        self.source: npt.NDArray[np.uint8] = np.concatenate(source)
        self.offsets: Ints = np.concatenate(offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state."""
        return int(self._hidden[0].shape[1])

    def spoken(self, conversation: int) -> npt.NDArray[np.int32]:
        """The tokens that the target has said in it."""
        part = slice(int(self.offsets[conversation]), int(self.offsets[conversation + 1]))
        return self.tokens[part][self.source[part] > 0]

    def hidden(self, begin: int, end: int) -> torch.Tensor:
        """bfloat16 [end - begin, hidden]; the positions must be of one conversation."""
        shard = int(np.searchsorted(self._begins, begin, side="right")) - 1
        first = self._begins[shard]
        bits = np.array(self._hidden[shard][begin - first : end - first])
        return torch.from_numpy(bits).view(torch.bfloat16)

    def auxiliary(self, layer: int, begin: int, end: int) -> torch.Tensor:
        """bfloat16 [end - begin, hidden] of an auxiliary layer (EAGLE-3)."""
        bits = self.cached(AUX, f"layer.{layer}", begin, end)
        return torch.from_numpy(bits).view(torch.bfloat16)

    def cached(self, kind: str, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """A copy of rows of an array of another kind of shard beside the hidden states."""
        shard = int(np.searchsorted(self._begins, begin, side="right")) - 1
        first = self._begins[shard]
        return np.array(self._opened(kind, shard)[name][begin - first : end - first])

    def require(self, kind: str) -> None:
        """Raise TrainError if not all shards of a kind are there and of their full size."""
        for shard in range(len(self._shards)):
            self._opened(kind, shard)

    def _opened(self, kind: str, shard: int) -> shards.Arrays:
        assert self._folder is not None
        if (kind, shard) not in self._maps:
            path = shards.shard_path(self._folder, kind, self._shards[shard])
            try:
                found = shards.read_shard(path, check=False)
                require_text(found, self.tokens[slice(*self._begins[shard : shard + 2])])
                self._maps[kind, shard] = found.arrays
            except shards.BrokenShard as error:
                raise TrainError(f"{error}; give the same command again to make it anew.") from None
        return self._maps[kind, shard]

    def split(
        self, validation: float, excluded: Set[int], first: int | None = None
    ) -> tuple[Ints, Ints]:
        """(train, validation) conversations; a conversation's side depends on its first tokens only.

        first: how many these are; None: all before the first answer, so that the answers to one
            prompt are on one side, and prompts that begin alike are on both.
        The lowest digest is validated with where no greedy answer would be otherwise: if more text
        comes, what takes its place was not trained on.
        """
        digests: dict[int, int] = {}
        for i in range(len(self)):
            if i not in excluded:
                begin, end = int(self.offsets[i]), int(self.offsets[i + 1])
                size = first or int(np.argmax(self.source[begin:end] > 0))
                tokens = self.tokens[begin : min(begin + size, end)]
                digest = hashlib.blake2b(tokens.tobytes(), digest_size=4).digest()
                digests[i] = int.from_bytes(digest)
        greedy = {
            digest
            for i, digest in digests.items()
            if (self.source[self.offsets[i] : self.offsets[i + 1]] == GREEDY).any()
        }
        bound = max(validation * 2**32, min(greedy, default=-1) + 1)
        held_out = [i for i, digest in digests.items() if digest < bound]
        train = [i for i, digest in digests.items() if digest >= bound]
        return np.array(train, np.int64), np.array(held_out, np.int64)

    def containing(self, texts: Sequence[Sequence[int]], length: int = 13) -> set[int]:
        """Conversations that share `length` tokens in a row with one of `texts`, given as ids."""
        known = {
            tuple(text[i : i + length]) for text in texts for i in range(len(text) - length + 1)
        }
        if not known:
            return set()
        firsts = np.zeros(int(self.tokens.max()) + 1, bool)
        firsts[[gram[0] for gram in known if gram[0] < len(firsts)]] = True
        found = set()
        for i in range(len(self)):
            tokens = self.tokens[self.offsets[i] : self.offsets[i + 1]]
            for at in np.flatnonzero(firsts[tokens]):
                if tuple(tokens[at : at + length].tolist()) in known:
                    found.add(i)
                    break
        return found

    def windows(self, conversations: Ints, width: int) -> Ints:
        """int64 [n, 3]: stretches in which the target speaks, each from the position before its first
        token to its end, and the end of the whole answer."""
        found = [
            (at, min(at + width, end), end)
            for begin, end in self._runs(conversations, self.source > 0, shortest=2)
            for at in range(begin, end - 2, width)
        ]
        return np.array(found, np.int64).reshape(-1, 3)

    def stretches(self, conversations: Ints, width: int) -> Ints:
        """int64 [n, 4]: where a conversation begins, a stretch of at most `width` positions in which
        the target speaks (begin, end), and where the conversation ends."""
        found = []
        for i in conversations:
            start, end = int(self.offsets[i]), int(self.offsets[i + 1])
            speaks = np.flatnonzero(self.source[start:end] > 0)
            if len(speaks) < 2 or speaks[-1] < 2:
                continue
            first, last = start + max(int(speaks[0]) - 1, 0), start + int(speaks[-1]) - 1
            found += [
                (start, at, min(at + width, last), end)
                for at in range(first, last, width)
                if (self.source[at : min(at + width, last) + 2] > 0).any()
            ]
        return np.array(found, np.int64).reshape(-1, 4)

    def rows(self, windows: Ints, depth: int) -> Rows:
        """The windows, each followed by what `depth` drafts from its last position reach."""
        hidden, tokens, source, ends, starts = [], [], [], [], []
        at = 0
        for begin, end, answered in windows:
            last = min(int(end) + depth + 1, int(answered))
            size = last - int(begin)
            hidden.append(self.hidden(int(begin), last))
            tokens.append(self.tokens[begin:last])
            source.append(self.source[begin:last])
            ends.append(np.full(size, at + size))
            speaks = np.flatnonzero(source[-1][1 : int(end - begin) + 1])
            starts.append(at + speaks)
            at += size
        return Rows(
            torch.cat(hidden),
            torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            torch.from_numpy(np.concatenate(source)),
            torch.from_numpy(np.concatenate(ends)),
            torch.from_numpy(np.concatenate(starts)),
        )

    def greedy_runs(self, conversations: Ints, shortest: int = 8) -> Ints:
        """int64 [n, 2]: from the position before a greedy answer to the answer's end."""
        found = self._runs(conversations, self.source == GREEDY, shortest)
        return np.array(found, np.int64).reshape(-1, 2)

    def _runs(
        self, conversations: Ints, wanted: npt.NDArray[np.bool_], shortest: int
    ) -> list[tuple[int, int]]:
        """(position before it, end) of each run of wanted tokens."""
        found = []
        for i in conversations:
            begin, end = int(self.offsets[i]), int(self.offsets[i + 1])
            inside = wanted[begin:end].astype(np.int8)
            edges = np.flatnonzero(np.diff(np.concatenate([[0], inside, [0]])))
            for first, last in edges.reshape(-1, 2):
                if last - first >= shortest and first > 0:
                    found.append((begin + int(first) - 1, begin + int(last)))
        return found


class Batches:
    """Endless batches of windows; `epoch` and `place` say where it is, and can be set to resume."""

    def __init__(self, windows: Ints, size: int, seed: int) -> None:
        self._windows, self._size, self._seed = windows, size, seed
        self.epoch, self.place = 0, 0

    @property
    def per_epoch(self) -> int:
        """Batches an epoch; the last windows of each shuffle are left out."""
        return max(len(self._windows) // self._size, 1)

    def __iter__(self) -> Iterator[Ints]:
        while True:
            order = np.random.default_rng((self._seed, self.epoch)).permutation(len(self._windows))
            while self.place < self.per_epoch:
                chosen = order[self.place * self._size : (self.place + 1) * self._size]
                self.place += 1
                yield self._windows[np.sort(chosen)]
            self.epoch, self.place = self.epoch + 1, 0

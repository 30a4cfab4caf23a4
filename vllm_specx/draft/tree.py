"""A draft: a tree of tokens that the target verifies in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Reach = npt.NDArray[np.float32]

_CHAIN_PARENTS: IntArray = np.arange(-1, 511, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Drafted tokens in topological order, the best child first.

    tokens: int32 [n], token ids.
    parents: int32 [n], index of each token's parent, -1 for children of the last committed token.
    reach: float32 [n], the probability that each node is accepted with all above it, falling; None: not
        known. The nodes of the best tree of any smaller size come first.
    window: the last so many nodes are a window of lookahead decoding: there for what the target says after
        them, and no candidates, though one that comes true is accepted as any other.
    asked: of the last so many nodes, all in the window, that comes back (DraftContext.answers).
    A chain is the tree whose parents are i - 1. Any prefix of a tree is a tree.
    """

    tokens: IntArray
    parents: IntArray
    reach: Reach | None = None
    window: int = 0
    asked: int = 0

    @classmethod
    def chain(cls, tokens: Sequence[int] | IntArray) -> DraftTree:
        """A draft without branches."""
        array = np.asarray(tokens, dtype=np.int32)
        n = len(array)
        parents = (
            _CHAIN_PARENTS[:n] if n <= len(_CHAIN_PARENTS) else np.arange(-1, n - 1, dtype=np.int32)
        )
        return cls(array, parents)

    @property
    def is_chain(self) -> bool:
        """Whether every token has at most one child."""
        return bool(np.array_equal(self.parents, np.arange(-1, len(self.parents) - 1)))

    def depths(self) -> npt.NDArray[np.int64]:
        """int64 [n]: how many tokens after the last committed one each node is; its children are at 1."""
        found = np.empty(len(self.parents), np.int64)
        for j, parent in enumerate(self.parents.tolist()):
            found[j] = 1 if parent < 0 else found[parent] + 1
        return found

    def depth(self) -> int:
        """Tokens of the longest path."""
        return int(self.depths().max(initial=0))

    def prefix(self, nodes: int) -> DraftTree:
        """The first `nodes` nodes."""
        if nodes >= len(self.tokens):
            return self
        reach = None if self.reach is None else self.reach[:nodes]
        cut = len(self.tokens) - nodes
        return DraftTree(
            self.tokens[:nodes],
            self.parents[:nodes],
            reach,
            max(self.window - cut, 0),
            max(self.asked - cut, 0),
        )

    def candidates(self) -> DraftTree:
        """Without the window."""
        return self.prefix(len(self.tokens) - self.window)

    def beside(self, window: DraftTree, asked: int) -> DraftTree:
        """With a window, whose last `asked` nodes' next tokens are wanted."""
        size, rows = len(self.tokens), len(window.tokens)
        below = np.where(window.parents < 0, -1, window.parents + size)
        return DraftTree(
            np.concatenate([self.tokens, window.tokens]),
            np.concatenate([self.parents, below]).astype(np.int32),
            None if self.reach is None else np.append(self.reach, np.zeros(rows, np.float32)),
            rows,
            asked,
        )

    def best_path(self) -> DraftTree:
        """The tokens along the best child of each node, as a chain that keeps their reach; no window."""
        if self.window:
            return self.candidates().best_path()
        if self.is_chain:
            return self
        path: list[int] = []
        node = -1
        for i, parent in enumerate(self.parents.tolist()):
            if parent == node:
                path.append(i)
                node = i
        chain = DraftTree.chain(self.tokens[path])
        return replace(chain, reach=None if self.reach is None else self.reach[path])

    def known(self, vocab_size: int) -> DraftTree:
        """What comes before the first token that is no id below vocab_size."""
        unknown = np.flatnonzero((self.tokens < 0) | (self.tokens >= vocab_size))
        return self.prefix(int(unknown[0])) if len(unknown) else self


EMPTY_DRAFT = DraftTree.chain(())

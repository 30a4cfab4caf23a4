"""How large a draft tree may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TreeLimits(Protocol):
    """nodes: tokens of a tree at most. branching: children of a node at most, and nodes of one depth that
    get children. depth: tokens of a path at most."""

    @property
    def nodes(self) -> int: ...

    @property
    def branching(self) -> int: ...

    @property
    def depth(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Implements TreeLimits."""

    nodes: int
    branching: int
    depth: int

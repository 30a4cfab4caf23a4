"""Trees grown depth by depth, one forward of the draft for all nodes that get children.

As EAGLE-2 does (arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specx.draft.best_nodes import Trees, best_nodes
from vllm_specx.draft.depth_calibration import BINS, FloatArray
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import IntArray
from vllm_specx.draft.tree_rule import TreeRule


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """The nodes of the last depth that get children, W of each of B requests.

    tokens: int64 [B, W]. above: int64 [B, W], the place of each one's parent in the beam before.
    """

    tokens: torch.Tensor
    above: torch.Tensor


class Growth:
    """The candidates of B trees, on the draft's device.

    table: float64 [depth, BINS], acceptance by depth and confidence (DepthCalibration.table).
    branching: children of a node, and nodes of a depth that get children. targets: draft ids -> target ids.
    """

    def __init__(
        self,
        table: FloatArray,
        batch: int,
        branching: int,
        targets: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._table = torch.from_numpy(table).to(device, torch.float32)
        self._branching, self._targets, self._device = branching, targets, device
        self._batch = batch
        self._going = torch.arange(batch, device=device)
        self._reached = torch.ones(batch, 1, device=device)
        self._beam = torch.full((batch, 1), -1, device=device)
        self._levels: list[tuple[torch.Tensor, ...]] = []
        self._before = 0

    @property
    def depth(self) -> int:
        """Depths so far."""
        return len(self._levels)

    def add(self, logits: torch.Tensor) -> Beam:
        """One more depth; logits [B * W, V] of the beam (W is 1 at first)."""
        batch = len(self._going)
        width = min(self._branching, logits.shape[-1])
        logits = logits.float()
        values, best = logits.topk(width, -1)
        values = torch.exp(values - logits.logsumexp(-1, keepdim=True)).view(batch, -1, width)
        estimate = self._table[self.depth].take(_bins(values))
        estimate = estimate / estimate.sum(-1, keepdim=True).clamp_min(1.0)
        reach = (self._reached[..., None] * estimate).flatten(1)
        tokens = self._targets(best).view(batch, -1)
        parents = self._beam[..., None].expand_as(values).flatten(1)
        self._levels.append((self._going, tokens, parents, values.flatten(1), reach))
        self._reached, chosen = reach.topk(min(self._branching, reach.shape[1]), -1)
        self._beam = self._before + chosen
        self._before += reach.shape[1]
        return Beam(tokens.gather(1, chosen), chosen // width)

    def stay(self, rule: TreeRule, budgets: IntArray, context: DraftContext) -> torch.Tensor | None:
        """Rows int64 [n] of the beam's requests whose trees go one deeper; None: all of them.

        budgets: of all B. Waits for the device.
        """
        _, _, _, _, reach = self._levels[-1]
        candidates: FloatArray = np.zeros((self._batch, self._before))
        first = 0
        for rows, *_, known in self._levels:
            candidates[rows.numpy(), first : first + known.shape[1]] = known.numpy()
            first += known.shape[1]
        going = self._going.numpy()
        above = 1.0 if self.depth == 1 else self._above
        frontier: FloatArray = np.zeros((self._batch, self._reached.shape[1]))
        frontier[going] = self._reached.numpy()
        ratio: FloatArray = np.zeros(self._batch)
        ratio[going] = reach.sum(1).numpy() / np.maximum(above, 1e-9)
        alive = rule.goes_on(candidates, frontier, ratio, budgets, context.after(self.depth))[going]
        self._above: FloatArray | float = self._reached.sum(1).numpy().astype(np.float64)
        if alive.all():
            return None
        rows = torch.from_numpy(np.flatnonzero(alive))
        self._going = self._going.index_select(0, rows)
        self._reached = self._reached.index_select(0, rows)
        self._beam = self._beam.index_select(0, rows)
        self._above = self._above[alive]
        return rows

    def trees(self, nodes: int) -> Trees:
        """The best `nodes` of each tree: one transfer to the host."""
        sizes = [level[4].shape[1] for level in self._levels]
        whole = torch.zeros(4, self._batch, sum(sizes), device=self._device)
        first = 0
        for (rows, *parts), size in zip(self._levels, sizes, strict=True):
            # Ids below 2**24 are exact in float32.
            block = torch.stack([part.float() for part in parts])
            if len(rows) == self._batch:
                whole[:, :, first : first + size] = block
            else:
                whole[:, rows, first : first + size] = block
            first += size
        tokens, parents, probabilities, reach = whole.cpu().numpy()
        depths = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        return best_nodes(
            tokens.astype(np.int32),
            parents.astype(np.int32),
            depths,
            probabilities,
            reach.astype(np.float64),
            nodes,
        )


def _bins(probabilities: torch.Tensor) -> torch.Tensor:
    """depth_calibration.bin_of, on the device."""
    scaled = (torch.logit(probabilities, 1e-6) + 4.0) * (BINS / 8.0)
    return scaled.clamp(0, BINS - 1).long()

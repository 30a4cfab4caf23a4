"""Draft heads as a proposer: chains by argmax, trees by the best candidates of each head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.draft.best_first import fixed_tree, parallel_tree
from vllm_specx.draft.chain_drafts import proposed
from vllm_specx.draft.chain_rule import ChainRule
from vllm_specx.draft.chains import Chains, ChainSteps, draw
from vllm_specx.draft.checkpoints import CheckpointError, HeadWeights
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.depth_calibration import DepthCalibration
from vllm_specx.draft.medusa_config import MedusaConfig
from vllm_specx.draft.medusa_heads import ParallelHeads, SequentialHeads, sequential_from
from vllm_specx.draft.outcomes import Guess, Outcomes, to_host
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree, IntArray


@dataclass(frozen=True, slots=True)
class _Made:
    """A tree of one request. depths, probabilities: [n], of its nodes."""

    tree: DraftTree
    depths: IntArray
    probabilities: npt.NDArray[np.float32]


class MedusaDrafter:
    """Implements draft.proposer.Proposer with draft heads.

    heads: a checkpoint that fits the target (checkpoints.load_heads).
    lm_head: [V, hidden], all rows of the target's lm_head, in the target's dtype; rows of the draft
        vocabulary are copied once. Not needed if the checkpoint has its own.
    embeddings: [V, hidden], the target's input embeddings, which sequential heads need.
    Everything runs in the dtype and on the device of lm_head. One transfer to the host a step.

    Raises CheckpointError if the heads need something that is not given.
    """

    needs_hidden_states: ClassVar[bool] = True
    needs_verified_rows: ClassVar[bool] = False

    def __init__(
        self,
        config: MedusaConfig,
        heads: HeadWeights,
        *,
        lm_head: torch.Tensor | None,
        embeddings: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._config = config
        reference = lm_head if lm_head is not None else heads.lm_heads
        if reference is None:
            raise CheckpointError(
                f"the heads {config.heads} have no lm_head of their own, and the target's is not given."
            )
        self._device = device or reference.device
        self._dtype = reference.dtype
        self._on_cpu = self._device.type == "cpu"
        self._vocabulary(config, heads, lm_head)
        self._parallel: ParallelHeads | None = None
        self._sequential: SequentialHeads | None = None
        if heads.conditioning == "hydra":
            if embeddings is None:
                raise CheckpointError(
                    f"the heads {config.heads} are sequential and need the target's embeddings."
                )
            self._embeddings = embeddings
            self._sequential = sequential_from(
                heads.sequential, depth=heads.depth, dtype=self._dtype
            ).to(self._device)
            self._sequential.pack()
        else:
            assert heads.blocks is not None
            biases = None if heads.biases is None else heads.biases.to(self._device, self._dtype)
            self._parallel = ParallelHeads(heads.blocks.to(self._device, self._dtype), biases)
            self._parallel.pack()
        self.depth = heads.depth
        self.draft_steps = 0
        self.missed: Collection[str] = ()
        self.acceptance = heads.acceptance
        self._scale = heads.logit_scale
        self._calibration = DepthCalibration(heads.depth, heads.acceptance)
        self._outcomes = Outcomes(self._calibration)
        self.rule = ChainRule(
            self._calibration,
            min_probability=config.min_probability,
            token_cost=config.token_cost,
            on_cpu=self._on_cpu,
        )
        self._fixed = fixed_tree(config.choices) if config.choices else None
        if self._fixed is not None and int(self._fixed[0].max()) >= heads.depth:
            raise CheckpointError(
                f"choices is {int(self._fixed[0].max()) + 1} deep, but {config.heads} has "
                f"{heads.depth} heads."
            )

    def _vocabulary(
        self, config: MedusaConfig, heads: HeadWeights, lm_head: torch.Tensor | None
    ) -> None:
        vocab, own = heads.vocab, heads.lm_heads
        if config.vocab is not None:
            if vocab is None:
                raise CheckpointError(
                    f"vocab is {config.vocab}, but {config.heads} has no token_map that says which "
                    "tokens are frequent; leave vocab out."
                )
            vocab = vocab.truncated(config.vocab)
        if own is not None:
            own = own[:, : len(vocab)] if vocab is not None else own
            own = own.to(self._device, self._dtype)
        rows = None if vocab is None else vocab.token_ids.to(self._device)
        self._token_map = rows
        self._own: torch.Tensor | None = None
        if own is not None and own.shape[0] > 1:
            self._own = own.transpose(1, 2).contiguous()
            return
        if own is not None:
            weight = own[0]
        else:
            assert lm_head is not None
            weight = lm_head.to(self._device) if rows is None else lm_head[rows.to(lm_head.device)]
        self._lm_head = Dense(weight.detach().to(self._device).contiguous())
        self._lm_head.pack()

    @property
    def stops_early(self) -> bool:
        """See draft.proposer.TrainedDrafter."""
        return self._sequential is not None and self._on_cpu

    def forwards(self, depth: int) -> int:
        """See draft.proposer.TrainedDrafter: parallel heads answer together."""
        return depth if self._parallel is None else 1

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One draft a request, of at most its budget; see draft.proposer.DraftContext."""
        self._outcomes.learn(context)
        self.draft_steps = 0
        active = np.flatnonzero(context.budgets > 0)
        drafts = [EMPTY_DRAFT] * len(context.request_ids)
        if not len(active):
            return drafts
        assert context.hidden_states is not None
        hidden = context.hidden_states
        if len(active) < len(drafts):
            hidden = hidden[torch.from_numpy(active).to(hidden.device, non_blocking=True)]
        hidden = hidden.to(self._dtype)
        budgets = context.budgets[active]
        last = context.token_ids[context.rows[active], context.num_tokens[active] - 1]
        if self._config.topology == "chain":
            chains = self._chains(hidden, last, budgets, context)
            self.draft_steps = chains.steps
            made = proposed(chains, active.tolist(), context, self.rule, self._outcomes)
            return [made.get(i, EMPTY_DRAFT) for i in range(len(drafts))]
        self.draft_steps = self.forwards(self.depth)
        if self._parallel is not None:
            trees = self._parallel_trees(hidden, budgets)
        else:
            trees = self._sequential_trees(hidden, last, budgets)
        for i, each in zip(active, trees, strict=True):
            drafts[i] = each.tree
            guess = Guess(each.tree, each.depths, each.probabilities, int(context.num_tokens[i]))
            self._outcomes.expect(context.request_ids[i], guess)
        return drafts

    def logits(self, hidden: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Parallel heads: hidden [B, hidden] -> [heads, B, draft vocabulary]."""
        assert self._parallel is not None
        return self._logits(self._parallel(hidden, heads))

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        if self._own is not None:
            logits = torch.matmul(states, self._own[: states.shape[0]])
        else:
            logits = self._lm_head(states)
        return logits if self._scale == 1.0 else logits * self._scale

    def _targets(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self._token_map is None else self._token_map[draft_ids]

    def _chains(
        self, hidden: torch.Tensor, last: IntArray, budgets: IntArray, context: DraftContext
    ) -> Chains:
        depth = min(self.depth, int(budgets.max()))
        if self._parallel is None:
            goes_on = self.rule.goes_on(budgets, context) if self.stops_early else None
            return draw(self._sequential_steps(hidden, last), len(budgets), depth, goes_on)
        logits = self.logits(hidden, depth)
        best = logits.max(-1).indices
        chosen = torch.softmax(logits, -1).gather(-1, best[..., None])[..., 0]
        tokens, probabilities = to_host(self._targets(best).T, chosen.T)
        return Chains(tokens, probabilities, np.full(len(budgets), depth, np.int32), 1)

    def _sequential_steps(self, state: torch.Tensor, last: IntArray) -> ChainSteps:
        assert self._sequential is not None
        token = torch.from_numpy(last.astype(np.int64)).to(self._device, non_blocking=True)
        while True:
            state = self._sequential(state, self._embed(token))
            logits = self._logits(state)
            best = logits.max(-1).indices
            probability = torch.softmax(logits, -1).gather(-1, best[:, None])[:, 0]
            token = self._targets(best)
            keep = yield token, probability
            if keep is not None:
                state, token = state.index_select(0, keep), token.index_select(0, keep)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._embeddings[tokens.to(self._embeddings.device)].to(self._device, self._dtype)

    def _parallel_trees(self, hidden: torch.Tensor, budgets: IntArray) -> list[_Made]:
        logits = self.logits(hidden)
        width = min(self._width(), logits.shape[-1])
        values, best = torch.softmax(logits, -1).topk(width, -1)
        tokens, probabilities = to_host(
            self._targets(best).transpose(0, 1), values.transpose(0, 1)
        )  # [B, depth, width] each
        acceptance = np.swapaxes(self._calibration.estimate(np.swapaxes(probabilities, 1, 2)), 1, 2)
        made = []
        for i, budget in enumerate(budgets):
            if self._fixed is not None:
                depths, ranks, parents = (part[:budget] for part in self._fixed)
            else:
                nodes = min(int(budget), self._config.nodes)
                depths, ranks, parents = parallel_tree(acceptance[i], nodes, self._floor())
            tree = DraftTree(tokens[i, depths, ranks], parents)
            made.append(_Made(tree, depths, probabilities[i, depths, ranks]))
        return made

    def _width(self) -> int:
        return self._config.top_k if self._fixed is None else int(self._fixed[1].max()) + 1

    def _floor(self) -> float:
        return self._config.min_probability or 0.0

    def _sequential_trees(
        self, hidden: torch.Tensor, last: IntArray, budgets: IntArray
    ) -> list[_Made]:
        """Level by level: the top_k best nodes of a level get top_k children each (as EAGLE-2,
        arXiv 2406.16858); the best nodes of all levels are the tree."""
        assert self._sequential is not None
        batch, width = len(hidden), self._config.top_k
        table = torch.from_numpy(self._calibration.table()).to(self._device, torch.float32)
        token = torch.from_numpy(last.astype(np.int64)).to(self._device)[:, None]
        state, reached = hidden[:, None], torch.ones(batch, 1, device=self._device)
        beam = torch.full((batch, 1), -1, device=self._device)
        levels: list[tuple[torch.Tensor, ...]] = []
        for d in range(self.depth):
            state = self._sequential(state, self._embed(token))
            logits = self._logits(state)
            values, best = torch.softmax(logits, -1).topk(min(width, logits.shape[-1]), -1)
            estimate = reached[..., None] * table[d, _bins(values.float())]
            parents = beam[..., None].expand_as(best)
            levels.append(
                tuple(
                    x.flatten(1) for x in (self._targets(best), values.float(), estimate, parents)
                )
            )
            reached, chosen = levels[-1][2].topk(min(width, levels[-1][2].shape[1]), -1)
            before = sum(level[0].shape[1] for level in levels[:-1])
            beam = before + chosen
            token = levels[-1][0].gather(1, chosen)
            above = chosen // best.shape[-1]
            state = state.gather(1, above[..., None].expand(-1, -1, state.shape[-1]))
        sizes = [level[0].shape[1] for level in levels]
        joined = [torch.cat([level[j] for level in levels], 1).float() for j in range(4)]
        packed = torch.stack(joined).cpu().numpy()
        depths = np.repeat(np.arange(self.depth, dtype=np.int32), sizes)
        return [
            self._select(packed[:, i], depths, min(int(budget), self._config.nodes))
            for i, budget in enumerate(budgets)
        ]

    def _select(self, packed: npt.NDArray[np.float32], depths: IntArray, nodes: int) -> _Made:
        tokens, probabilities, estimate, parents = packed
        # Ties fall to the shallower node, so parents are chosen with their children.
        order = np.lexsort((np.arange(len(estimate)), -estimate))
        place: dict[int, int] = {-1: -1}
        kept: list[int] = []
        for node in order:
            if len(kept) == nodes or estimate[node] < self._floor():
                break
            if (parent := int(parents[node])) in place:
                place[int(node)] = len(kept)
                kept.append(int(node))
                assert place[parent] < len(kept)
        tree = DraftTree(
            tokens[kept].astype(np.int32),
            np.array([place[int(parents[node])] for node in kept], np.int32),
        )
        return _Made(tree, depths[kept], probabilities[kept])


def _bins(probabilities: torch.Tensor) -> torch.Tensor:
    """depth_calibration.bin_of, on the device."""
    from vllm_specx.draft.depth_calibration import BINS

    scaled = (torch.logit(probabilities, 1e-6) + 4.0) * (BINS / 8.0)
    return scaled.clamp(0, BINS - 1).long()

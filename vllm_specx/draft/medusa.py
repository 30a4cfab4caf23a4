"""Draft heads as a proposer: chains by argmax, trees by the best candidates of each head."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import numpy as np
import torch

from vllm_specx.draft.best_first import fixed_tree
from vllm_specx.draft.best_nodes import Trees, best_nodes, fixed_reach, parallel_candidates
from vllm_specx.draft.chain_drafts import proposed
from vllm_specx.draft.chain_rule import ChainRule
from vllm_specx.draft.chains import Chains, ChainSteps, draw
from vllm_specx.draft.checkpoints import CheckpointError, HeadWeights
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.depth_calibration import DepthCalibration
from vllm_specx.draft.growth import Growth
from vllm_specx.draft.medusa_config import MedusaConfig
from vllm_specx.draft.medusa_heads import ParallelHeads, SequentialHeads, sequential_from
from vllm_specx.draft.outcomes import Outcomes, to_host
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree, IntArray
from vllm_specx.draft.tree_limits import TreeLimits
from vllm_specx.draft.tree_rule import TreeRule, proposed_trees


class MedusaDrafter:
    """Implements draft.proposer.Proposer with draft heads.

    heads: a checkpoint that fits the target (checkpoints.load_heads).
    lm_head: [V, hidden], all rows of the target's lm_head, in the target's dtype; rows of the draft
        vocabulary are copied once. Not needed if the checkpoint has its own.
    embeddings: [V, hidden], the target's input embeddings, which sequential heads need.
    tree: how large the trees may be; None: chains.
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
        tree: TreeLimits | None = None,
    ) -> None:
        tree = config.tree if tree is None else tree
        self._config, self._tree = config, tree
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
        if tree is not None and config.choices is None:
            self.depth = min(heads.depth, tree.depth)
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
        self._tree_rule = TreeRule(
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
        tree = self._tree
        if tree is None:
            chains = self._chains(hidden, last, budgets, context)
            self.draft_steps = chains.steps
            made = proposed(chains, active.tolist(), context, self.rule, self._outcomes)
            return [made.get(i, EMPTY_DRAFT) for i in range(len(drafts))]
        if self._parallel is not None:
            trees = self._parallel_trees(hidden, tree)
            self.draft_steps = 1
        else:
            trees = self._sequential_trees(hidden, last, tree, context)
        spent = context.after(self.draft_steps)
        made = proposed_trees(trees, active.tolist(), spent, self._tree_rule, self._outcomes)
        return [made.get(i, EMPTY_DRAFT) for i in range(len(drafts))]

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

    def _parallel_trees(self, hidden: torch.Tensor, tree: TreeLimits) -> Trees:
        logits = self.logits(hidden, self.depth)
        width = tree.branching if self._fixed is None else int(self._fixed[1].max()) + 1
        values, best = torch.softmax(logits, -1).topk(min(width, logits.shape[-1]), -1)
        tokens, probabilities = to_host(
            self._targets(best).transpose(0, 1), values.transpose(0, 1)
        )  # [B, depth, width] each
        acceptance = self._tree_rule.children(probabilities)
        if self._fixed is None:
            parents, ranks, depths, reach = parallel_candidates(acceptance, tree.nodes)
        else:
            depths, fixed_ranks, fixed_parents = self._fixed
            reach = fixed_reach(acceptance, *self._fixed)
            ranks, parents = (
                np.broadcast_to(part, reach.shape) for part in (fixed_ranks, fixed_parents)
            )
        rows = np.arange(len(hidden))[:, None]
        return best_nodes(
            tokens[rows, depths, ranks],
            parents,
            depths,
            probabilities[rows, depths, ranks],
            reach,
            tree.nodes,
        )

    def _sequential_trees(
        self, state: torch.Tensor, last: IntArray, tree: TreeLimits, context: DraftContext
    ) -> Trees:
        """Grown as EAGLE-2's (arXiv 2406.16858)."""
        assert self._sequential is not None
        budgets = context.budgets[context.budgets > 0]
        growth = Growth(
            self._calibration.table(), len(state), tree.branching, self._targets, self._device
        )
        token = torch.from_numpy(last.astype(np.int64)).to(self._device, non_blocking=True)
        state = state[:, None]
        token = token[:, None]
        while True:
            state = self._sequential(state, self._embed(token))
            beam = growth.add(self._logits(state.flatten(0, 1)))
            if growth.depth == self.depth:
                break
            rows = growth.stay(self._tree_rule, budgets, context) if self.stops_early else None
            token, above = beam.tokens, beam.above
            if rows is not None:
                if not len(rows):
                    break
                state, token, above = (part.index_select(0, rows) for part in (state, token, above))
            state = state.gather(1, above[..., None].expand(-1, -1, state.shape[-1]))
        self.draft_steps = growth.depth
        return growth.trees(tree.nodes)

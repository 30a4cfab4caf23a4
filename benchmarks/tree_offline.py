"""Acceptance length of draft trees against chains, without an engine: greedy answers are recorded once and
replayed through each drafter.

    python -m benchmarks.tree_offline record TEXTS.pt --dataset NAME=QUESTIONS.jsonl ...
    python -m benchmarks.tree_offline replay TEXTS.pt --out RESULT.json

A greedy answer is the same with any drafts, so what each drafter would have drafted, and how much of it would
have been accepted, follows from the answer and the target's states. Every step drafts all that it may; no time
is measured. Acceptance length: tokens a step, the bonus token among them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib import greedy_texts
from benchmarks.lib.errors import BenchError
from benchmarks.lib.greedy_texts import Text
from benchmarks.lib.provenance import describe
from vllm_specx.config import NgramConfig
from vllm_specx.draft.checkpoints import TargetShape, load_heads
from vllm_specx.draft.eagle import EagleDrafter
from vllm_specx.draft.eagle_checkpoints import load_eagle
from vllm_specx.draft.eagle_config import EagleConfig
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.medusa_config import MedusaConfig
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.proposer import DraftContext, Proposer, VerifiedRows
from vllm_specx.draft.tree import DraftTree
from vllm_specx.models import embedded
from vllm_specx.train.target import load_target

HEADS = Path(__file__).parents[1] / "recipes" / "heads"
MODEL = "embedded:smollm2-135m-instruct"
AUX_LAYERS = (2, 15, 27)
LONGEST = 2048
RANKS = 4


@dataclass(frozen=True)
class Limits:
    """Implements draft.tree_limits.TreeLimits."""

    nodes: int
    branching: int
    depth: int


@dataclass(frozen=True)
class Kind:
    """A drafter. build: with trees of this size, or chains of so many tokens. depth: of both."""

    build: Callable[[Limits | None, int], Proposer]
    depth: int
    branching: int


class Counts:
    """What became of the drafts of one run."""

    def __init__(self, depth: int) -> None:
        self.steps = self.accepted = self.nodes = 0
        self.deep = 0
        # By depth and rank among its siblings: nodes with all above them accepted, and how many were right.
        self.tried = np.zeros((depth, RANKS), np.int64)
        self.right = np.zeros((depth, RANKS), np.int64)

    def take(self, draft: DraftTree, truth: Sequence[int]) -> int:
        """How many tokens of the best path agree with what the target says next."""
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        node, agreed = -1, 0
        for token in truth:
            children = [i for i in range(node + 1, len(tokens)) if parents[i] == node]
            if agreed < len(self.tried):
                for rank, child in enumerate(children[:RANKS]):
                    self.tried[agreed, rank] += 1
                    self.right[agreed, rank] += tokens[child] == token
            node = next((child for child in children if tokens[child] == token), -2)
            if node < 0:
                break
            agreed += 1
        self.steps += 1
        self.accepted += agreed
        self.nodes += len(tokens)
        return agreed

    def summary(self) -> dict[str, Any]:
        return {
            "acceptance_length": round(1 + self.accepted / self.steps, 4),
            "nodes_a_step": round(self.nodes / self.steps, 2),
            "steps": self.steps,
        }

    def rates(self) -> list[list[float]]:
        """By depth and rank, of children whose parents were accepted."""
        return [[round(float(x), 4) for x in row] for row in self.right / np.maximum(self.tried, 1)]


def replay(proposer: Proposer, texts: Sequence[Text], budget: int, depth: int) -> dict[str, Counts]:
    """Each text as one request, one after the other. By group, and all."""
    counts = {"all": Counts(depth)}
    finished: list[str] = []
    for number, text in enumerate(texts):
        mine = counts.setdefault(text.group, Counts(depth))
        table = np.zeros((1, LONGEST), np.int32)
        table[0, : len(text.tokens)] = text.tokens
        read, committed = 0, text.prompt + 1
        name = f"{number}"
        while committed < len(text.tokens):
            drafts = proposer.propose(
                _context(name, text, table, read, committed, budget, finished, proposer)
            )
            finished = []
            truth = text.tokens[committed:]
            agreed = mine.take(drafts[0], truth)
            counts["all"].take(drafts[0], truth)
            read, committed = committed - 1, min(committed + agreed + 1, len(text.tokens))
        finished.append(name)
    return counts


def _context(
    name: str,
    text: Text,
    table: np.ndarray[Any, np.dtype[np.int32]],
    read: int,
    committed: int,
    budget: int,
    finished: list[str],
    proposer: Proposer,
) -> DraftContext:
    """A step that has read the tokens from `read` on, of which all but the last are accepted."""
    states = text.aux if isinstance(proposer, EagleDrafter) else (text.last,)
    place = np.array([read], np.int32)
    return DraftContext(
        request_ids=[name],
        rows=np.zeros(1, np.int32),
        token_ids=table,
        num_tokens=np.array([committed], np.int32),
        num_prompt_tokens=np.array([text.prompt], np.int32),
        sampled=[text.tokens[max(read + 1, text.prompt) : committed]],
        budgets=np.array([budget], np.int32),
        temperatures=np.zeros(1, np.float32),
        pools=["default"],
        finished=list(finished),
        vocab_size=49152,
        hidden_states=text.last[committed - 2 : committed - 1],
        verified=VerifiedRows(states, place, place, np.array([committed - 1 - read], np.int32)),
        tokens_read=committed - read,
    )


def kinds() -> dict[str, Kind]:
    """The drafters of recipes/heads, and the n-gram lookahead."""
    target = load_target(str(embedded.checkpoint(MODEL)))
    rows, hidden = target.lm_head.shape
    shape = TargetShape(hidden, rows, target.lm_head.dtype, num_layers=30)

    def medusa(folder: str) -> Callable[[Limits | None, int], Proposer]:
        heads = load_heads(HEADS / folder, shape)
        config = MedusaConfig(heads=folder, min_probability=0.0)
        return lambda tree, _: MedusaDrafter(
            config, heads, lm_head=target.lm_head, embeddings=target.embeddings, tree=tree
        )

    draft = load_eagle(HEADS / "smollm2-135m-eagle3", shape)

    def eagle(tree: Limits | None, _: int) -> Proposer:
        return EagleDrafter(
            EagleConfig(heads="eagle3", min_probability=0.0),
            draft,
            lm_head=target.lm_head,
            embeddings=target.embeddings,
            max_batch=1,
            max_model_len=LONGEST,
            cache_tokens=2 * LONGEST,
            tree=tree,
        )

    def ngram(tree: Limits | None, most: int) -> Proposer:
        return NgramLookahead(NgramConfig(min_probability=0.0), 1, LONGEST, most, tree)

    return {
        "medusa": Kind(medusa("smollm2-135m-medusa"), 4, 8),
        "hydra": Kind(medusa("smollm2-135m-hydra"), 4, 8),
        "eagle3": Kind(eagle, 5, 8),
        "ngram": Kind(ngram, 32, 8),
    }


def run(texts: Sequence[Text], nodes: Sequence[int], only: Sequence[str]) -> dict[str, Any]:
    """For each drafter: its chain, and trees of each size, at equal depth."""
    results: dict[str, Any] = {}
    for name, kind in kinds().items():
        if only and name not in only:
            continue
        chain = replay(kind.build(None, kind.depth), texts, kind.depth, kind.depth)
        entry: dict[str, Any] = {
            "depth": kind.depth,
            "branching": kind.branching,
            "chain": {group: counts.summary() for group, counts in chain.items()},
        }
        for size in nodes:
            limits = Limits(size, kind.branching, kind.depth)
            trees = replay(kind.build(limits, size), texts, size, kind.depth)
            entry[f"tree {size}"] = {group: counts.summary() for group, counts in trees.items()}
            before = entry["chain"]["all"]["acceptance_length"]
            after = entry[f"tree {size}"]["all"]["acceptance_length"]
            print(
                f"{name}: chain {before:.3f}, tree of {size} {after:.3f} ({after / before - 1:+.1%})",
                flush=True,
            )
            entry[f"tree {size}"]["over_chain"] = round(after / before, 4)
        if name != "ngram":
            whole = replay(kind.build(Limits(1024, 8, kind.depth), 1024), texts, 1024, kind.depth)
            entry["acceptance_by_depth_and_rank"] = whole["all"].rates()
        results[name] = entry
    return results


def dataset(value: str) -> tuple[str, Path]:
    name, _, path = value.partition("=")
    if not path or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"'{value}' is not NAME=FILE of an existing file")
    return name, Path(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="answer questions and keep the target's states")
    record.add_argument("texts", type=Path)
    record.add_argument("--dataset", type=dataset, action="append", required=True)
    record.add_argument("--questions", type=int, default=10, help="of each data set")
    record.add_argument("--max-tokens", type=int, default=128)
    again = commands.add_parser("replay", help="replay the answers through the drafters")
    again.add_argument("texts", type=Path)
    again.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64])
    again.add_argument("--only", nargs="+", default=[], help="these drafters")
    again.add_argument("--out", type=Path, help="a result there is added to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if args.command == "record":
            greedy_texts.record(
                embedded.checkpoint(MODEL),
                args.dataset,
                args.texts,
                questions=args.questions,
                max_tokens=args.max_tokens,
                aux_layers=AUX_LAYERS,
            )
            return 0
        texts = greedy_texts.load(args.texts)
        found = run(texts, args.nodes, args.only)
        if args.out:
            before = json.loads(args.out.read_text())["drafters"] if args.out.exists() else {}
            drafters = before | {name: before.get(name, {}) | e for name, e in found.items()}
            result = {**describe(), "texts": len(texts), "drafters": drafters}
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
RANKS = 8
ALL = 1024
"""Nodes, more than there are candidates."""


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

    def record(self) -> dict[str, Any]:
        """For JSON, and to be added up."""
        return {
            "steps": self.steps,
            "accepted": self.accepted,
            "nodes": self.nodes,
            "tried": self.tried.tolist(),
            "right": self.right.tolist(),
        }


def replay(proposer: Proposer, texts: Sequence[Text], budget: int, depth: int) -> Counts:
    """Each text as one request, one after the other."""
    counts = Counts(depth)
    finished: list[str] = []
    for number, text in enumerate(texts):
        table = np.zeros((1, LONGEST), np.int32)
        table[0, : len(text.tokens)] = text.tokens
        read, committed = 0, text.prompt + 1
        name = f"{number}"
        while committed < len(text.tokens):
            drafts = proposer.propose(
                _context(name, text, table, read, committed, budget, finished, proposer)
            )
            finished = []
            agreed = counts.take(drafts[0], text.tokens[committed:])
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


def run(
    texts: Sequence[Text],
    nodes: Sequence[int],
    only: Sequence[str],
    counts: dict[str, Any],
    most: int | None = None,
) -> int:
    """Chains, trees of each size at equal depth, and trees of all candidates, of each set of questions by
    itself; what is in `counts` already is not run again. most: runs. Returns how many there were."""
    makers, runs = kinds(), 0
    for name in only or makers:
        kind = makers[name]
        labels = {
            "chain": None,
            **{f"tree {n}": Limits(n, kind.branching, kind.depth) for n in nodes},
        }
        if name != "ngram":
            labels["all candidates"] = Limits(ALL, kind.branching, kind.depth)
        for group in dict.fromkeys(text.group for text in texts):
            mine = [text for text in texts if text.group == group]
            for label, limits in labels.items():
                entry = counts.setdefault(name, {}).setdefault(label, {})
                if group in entry or runs == most:
                    continue
                runs += 1
                budget = kind.depth if limits is None else limits.nodes
                made = replay(kind.build(limits, budget), mine, budget, kind.depth)
                entry[group] = made.record()
                length = 1 + made.accepted / made.steps
                print(f"{name}, {group}, {label}: {length:.3f} tokens a step", flush=True)
    return runs


def summary(counts: dict[str, Any]) -> dict[str, Any]:
    """Acceptance lengths by drafter, and how often children are right by depth and rank."""
    drafters: dict[str, Any] = {}
    for name, labels in counts.items():
        drafters[name] = {}
        for label, groups in labels.items():
            if not groups:
                continue
            total = {
                key: sum(g[key] for g in groups.values()) for key in ("steps", "accepted", "nodes")
            }
            if label == "all candidates":
                tried, right = (
                    np.sum([g[key] for g in groups.values()], axis=0) for key in ("tried", "right")
                )
                rates = right / np.maximum(tried, 1)
                drafters[name]["acceptance by depth and rank"] = rates.round(3).tolist()
                continue
            drafters[name][label] = {
                "acceptance_length": round(1 + total["accepted"] / total["steps"], 3),
                "nodes_a_step": round(total["nodes"] / total["steps"], 2),
                "by_set": {g: round(1 + c["accepted"] / c["steps"], 3) for g, c in groups.items()},
            }
        chain = drafters[name].get("chain")
        for label, entry in drafters[name].items():
            if chain and label.startswith("tree "):
                over = entry["acceptance_length"] / chain["acceptance_length"]
                entry["over_chain"] = round(over, 3)
    return drafters


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
    again.add_argument("--set", nargs="+", default=[], help="these sets of questions")
    again.add_argument(
        "--runs", type=int, help="at most so many now; status 3 says that all were there"
    )
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
        counts: dict[str, Any] = {}
        if args.out and args.out.exists():
            counts = json.loads(args.out.read_text())["counts"]
        chosen = [text for text in texts if not args.set or text.group in args.set]
        runs = run(chosen, args.nodes, args.only, counts, args.runs)
        if args.out:
            result = {
                **describe(),
                "questions": len(texts),
                "drafters": summary(counts),
                "counts": counts,
            }
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        return 0 if runs else 3
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prompt templates: text that is new in every round, and the same for every configuration.

A prompt file holds one JSON object a line:

    {"id": "rename-python", "task": "edit", "prompt": "Rename <<old>> to <<new>> ...",
     "slots": {"old": ["total", "sum"], ...}, "example": ["a question", "its answer"]}

The example, which may be left out, is shown as an earlier turn of the chat; with a "schema" the answer is constrained to
that JSON schema. Slots are filled in the order they are written; a text may name slots above it. A slot is
  a list of texts                          one of them
  {"int": [low, high]}                     a number, both ends included
  {"pool": "city"}                         a word of pools.json, never twice in one prompt
  {"repeat": [low, high], "text": "...", "slots": {...}, "join": "\\n"}    that many filled texts
A question file of MT-bench's kind ({"question_id", "category", "turns": [...]}, and "schema") is read too: its first turns.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.errors import BenchError

POOLS = Path(__file__).parents[1] / "prompts" / "pools.json"
_PLACE = re.compile(r"<<(\w+)>>")


@dataclass(frozen=True)
class Prompt:
    """One chat request. `key` is equal for equal messages: what tells fresh from seen."""

    id: str
    task: str
    messages: tuple[Mapping[str, str], ...]
    schema: Mapping[str, Any] | None = None
    """The answer is constrained to this JSON schema."""

    @property
    def key(self) -> str:
        return json.dumps([dict(message) for message in self.messages], sort_keys=True)


class _Filler:
    """Fills one prompt's slots from one stream of random numbers."""

    def __init__(self, seed: str, pools: Mapping[str, Sequence[str]]) -> None:
        self.random = random.Random(seed)
        self.pools = {name: list(words) for name, words in pools.items()}
        for words in self.pools.values():
            self.random.shuffle(words)

    def slots(self, slots: Mapping[str, Any], above: Mapping[str, str]) -> dict[str, str]:
        filled = dict(above)
        for name, slot in slots.items():
            filled[name] = self._slot(name, slot, filled)
        return filled

    def _slot(self, name: str, slot: Any, filled: Mapping[str, str]) -> str:
        match slot:
            case [*choices] if choices:
                return fill(self.random.choice(choices), filled)
            case {"int": [low, high]}:
                return str(self.random.randint(low, high))
            case {"pool": pool} if pool in self.pools:
                if not self.pools[pool]:
                    raise BenchError(f"slot '{name}': pool '{pool}' has too few words; add some.")
                return self.pools[pool].pop()
            case {"repeat": [low, high], "text": text}:
                inner = slot.get("slots", {})
                rows = (
                    fill(text, self.slots(inner, {**filled, "n": str(n + 1)}))
                    for n in range(self.random.randint(low, high))
                )
                return str(slot.get("join", "\n")).join(rows)
        raise BenchError(
            f"slot '{name}' is {json.dumps(slot)[:80]}, but a slot is a list, an 'int', a 'pool' "
            "or a 'repeat'."
        )


def fill(text: str, slots: Mapping[str, str]) -> str:
    """Replace every <<slot>> of a text."""

    def value(place: re.Match[str]) -> str:
        if place[1] not in slots:
            raise BenchError(f"a prompt names <<{place[1]}>>, which is not among its slots above.")
        return slots[place[1]]

    return _PLACE.sub(value, text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file."""
    if not path.is_file():
        raise BenchError(f"there is no prompt file {path}; name one that exists.")
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise BenchError(f"{path}, line {number} is not JSON ({error.msg}); mend it.") from None
    if not lines:
        raise BenchError(f"the prompt file {path} is empty; put a JSON object on each line.")
    return lines


def _messages(*turns: str) -> tuple[dict[str, str], ...]:
    roles = ("user", "assistant")
    return tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))


def vary(line: Mapping[str, Any], seed: str, pools: Mapping[str, Sequence[str]]) -> Prompt:
    """One variant of a template; the same seed gives the same text on every machine."""
    slots = _Filler(f"{seed}/{line['id']}", pools).slots(line.get("slots", {}), {})
    turns = [fill(text, slots) for text in (*line.get("example", ()), line["prompt"])]
    return Prompt(str(line["id"]), str(line.get("task", "")), _messages(*turns), line.get("schema"))


def _question(line: Mapping[str, Any]) -> Prompt:
    return Prompt(
        str(line["question_id"]),
        str(line.get("category", "")),
        _messages(line["turns"][0]),
        line.get("schema"),
    )


def make_prompts(
    path: Path,
    *,
    seed: int,
    cell: str,
    round_index: int,
    count: int | None = None,
    multiple_of: int = 1,
    batch_sizes: Sequence[int] = (),
    tasks: Sequence[str] = (),
) -> list[Prompt]:
    """The prompts of one round.

    Templates: `count` prompts (default: one a template), each template varied as often as needed.
    Questions: the next `count` (default all) of the file; the next batch size, and then the next
    round, go on where this one ends.
    cell: names what must not share prompts with anything else of the same round (group, batch).
    multiple_of: the batch size; the number of prompts is rounded up to it. batch_sizes: those of a
    round; none: only this one.
    """
    lines = read_lines(path)
    if tasks:
        lines = [line for line in lines if line.get("task", line.get("category")) in tasks]
        if not lines:
            raise BenchError(f"{path} has no prompts of the tasks {', '.join(tasks)}.")
    least = count or len(lines)
    wanted = _rounded(least, multiple_of)
    if "turns" in lines[0]:
        order = [_question(line) for line in lines]
        random.Random(seed).shuffle(order)
        sizes = [_rounded(least, size) for size in batch_sizes or (multiple_of,)]
        before = batch_sizes.index(multiple_of) if batch_sizes else 0
        start = round_index * sum(sizes) + sum(sizes[:before])
        return [order[(start + i) % len(order)] for i in range(wanted)]
    pools = json.loads(POOLS.read_text())
    return [
        vary(lines[i % len(lines)], f"{seed}/{cell}/{round_index}/{i // len(lines)}", pools)
        for i in range(wanted)
    ]


def _rounded(count: int, batch_size: int) -> int:
    """Whole batches."""
    return -(-count // batch_size) * batch_size

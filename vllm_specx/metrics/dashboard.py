"""The Grafana dashboard as a table of panels; `python -m vllm_specx.metrics.dashboard` writes dashboard.json.

It fits beside vLLM's own: the tag vllm, and the variables datasource, job, model_name, instance and engine.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specx.metrics.definitions import PREFIX

FILE = Path(__file__).with_name("dashboard.json")
_WHERE = (
    'job=~"$job",instance=~"$instance",model_name=~"$model_name",engine=~"$engine"'  # as vLLM's
)
_NONE = "No traffic"


def rate(name: str, by: str = "", where: str = "") -> str:
    """Growth a second over all chosen servers. name: without our prefix, or vLLM's with its own."""
    full = name if ":" in name else PREFIX + name
    selector = f"{_WHERE},{where}" if where else _WHERE
    return f"sum{f' by ({by})' if by else ''} (rate({full}{{{selector}}}[$__rate_interval]))"


def ratio(above: str, below: str) -> str:
    """A division that gives nothing where nothing happened."""
    return f"{above} / ({below} > 0)"


def share(above: str, below: str, by: str = "", where: str = "") -> str:
    """The ratio of two counters' growth."""
    return ratio(rate(above, by, where), rate(below, by))


def quantile(q: float, histogram: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', 'le')})"


def highest(name: str, by: str) -> str:
    """The largest value of a gauge."""
    return f"max by ({by}) ({PREFIX}{name}{{{_WHERE}}})"


@dataclass(frozen=True, slots=True)
class Panel:
    """queries: expression and legend. about: what it says; the metrics it reads are added."""

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    limits: tuple[tuple[str, float | None], ...] = ()
    top: float | None = None

    @property
    def metrics(self) -> list[str]:
        """The series that it reads."""
        return metrics_of(" ".join(query for query, _ in self.queries))


def metrics_of(query: str) -> list[str]:
    """Names of vLLM's and of our series in a PromQL expression, in order, each once."""
    found = re.findall(r"\bvllm(?:_specx)?:[a-z0-9_]+", query)
    return list(dict.fromkeys(found))


_ACCEPTANCE = share("accepted_tokens_total", "draft_tokens_total")
_BUBBLE = share("bubble_seconds_total", "bubble_base_seconds_total")
_SPEED_UP = share("plain_seconds_total", "foreseen_step_seconds_total")
_OFF = ratio(rate("decode_steps_total", where='speculated="no"'), rate("decode_steps_total"))
_HEALTHY = (("red", None), ("orange", 0.5), ("green", 0.65))


def mean(histogram: str) -> str:
    """The mean of a histogram."""
    return share(f"{histogram}_sum", f"{histogram}_count")


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Golden metrics",
        (
            Panel(
                "Acceptance rate",
                "Accepted over verified draft tokens: healthy from 65%, too low under 50%.",
                ((_ACCEPTANCE, "acceptance"),),
                "percentunit",
                "stat",
                6,
                _HEALTHY,
                1.0,
            ),
            Panel(
                "Time per output token (p50)",
                "While decoding; a step's time over the tokens that a request got from it.",
                ((quantile(0.5, "time_per_output_token_seconds"), "TPOT p50"),),
                "s",
                "stat",
                6,
            ),
            Panel(
                "Target forward bubble",
                "Share of a step in which the target waits for drafting. No traffic, too, with "
                "asynchronous scheduling, which does not wait.",
                ((_BUBBLE, "bubble"),),
                "percentunit",
                "stat",
                6,
                (("green", None), ("orange", 0.25), ("red", 0.4)),
                1.0,
            ),
            Panel(
                "Predicted speed-up",
                "Time that the same tokens would take without speculation, as the controller expects, "
                "over the time that they took; under 1 speculation costs.",
                ((_SPEED_UP, "speed-up"),),
                "short",
                "stat",
                6,
                (("red", None), ("orange", 0.97), ("green", 1.0)),
            ),
        ),
    ),
    (
        "Acceptance",
        (
            Panel(
                "Acceptance rate by scenario",
                "By the requests' specx_scenario.",
                (
                    (
                        share("accepted_tokens_total", "draft_tokens_total", "scenario"),
                        "{{scenario}}",
                    ),
                    (_ACCEPTANCE, "all"),
                ),
                "percentunit",
                top=1.0,
            ),
            Panel(
                "Accepted by depth",
                "Of the drafts that had a token at this depth, those accepted down to it.",
                (
                    (
                        share(
                            "accepted_tokens_by_depth_total", "draft_tokens_by_depth_total", "depth"
                        ),
                        "depth {{depth}}",
                    ),
                ),
                "percentunit",
                top=1.0,
            ),
            Panel(
                "Acceptance by depth, given the one before",
                "Of the drafts whose tokens before this depth were all accepted.",
                (
                    (
                        share(
                            "accepted_tokens_by_depth_total",
                            "judged_tokens_by_depth_total",
                            "depth",
                        ),
                        "depth {{depth}}",
                    ),
                ),
                "percentunit",
                top=1.0,
            ),
            Panel(
                "Acceptance length",
                "Tokens of a step with drafts, the bonus token included, and of all steps.",
                (
                    (f"1 + {share('accepted_tokens_total', 'drafts_total')}", "with drafts"),
                    (share("decode_tokens_total", "request_steps_total"), "all steps"),
                ),
            ),
            Panel(
                "Draft tokens",
                "A second: verified, accepted, and all tokens of decode steps.",
                (
                    (rate("draft_tokens_total"), "verified"),
                    (rate("accepted_tokens_total"), "accepted"),
                    (rate("decode_tokens_total"), "output"),
                ),
            ),
            Panel(
                "Draft trees",
                "Nodes that were verified, those on the accepted path, and trees verified as chains; rows of "
                "windows of lookahead decoding, and the tokens that they brought.",
                (
                    (rate("tree_nodes_total"), "nodes"),
                    (rate("tree_accepted_total"), "accepted"),
                    (rate("tree_fallbacks_total", "reason"), "fallback: {{reason}}"),
                    (rate("lookahead_rows_total"), "lookahead: rows"),
                    (rate("lookahead_accepted_total"), "lookahead: accepted"),
                ),
            ),
        ),
    ),
    (
        "Draft length",
        (
            Panel(
                "K",
                "Draft tokens that a request had verified in a step.",
                ((rate("draft_length_bucket", "le"), "{{le}}"),),
                kind="heatmap",
            ),
            Panel(
                "Steps without drafts",
                "Share of decode steps at K=0, and the mean K.",
                (
                    (_OFF, "share at K=0"),
                    (mean("draft_length"), "mean K"),
                ),
            ),
            Panel(
                "Changes of K",
                "A second, by reason: the controller's choice, what the proposer found, a trial, a "
                "step without drafts to measure one, other requests in the batch.",
                ((rate("k_changes_total", "reason"), "{{reason}}"),),
            ),
        ),
    ),
    (
        "Time",
        (
            Panel(
                "Step",
                "Mean time of a step, and of drafting and verifying where drafting is timed.",
                (
                    (mean("step_time_seconds"), "step"),
                    (mean("draft_time_seconds"), "draft"),
                    (mean("verify_time_seconds"), "verify"),
                ),
                "s",
            ),
            Panel(
                "Target forward bubble",
                "Share of the steps' time in which the target waits for drafting.",
                ((_BUBBLE, "bubble"),),
                "percentunit",
                top=1.0,
            ),
            Panel(
                "TPOT and ITL",
                "Time per output token beside vLLM's inter-token latency, which counts stream chunks: "
                "with speculation a chunk has several tokens, so ITL is longer than TPOT.",
                (
                    (quantile(0.5, "time_per_output_token_seconds"), "TPOT p50"),
                    (quantile(0.95, "time_per_output_token_seconds"), "TPOT p95"),
                    (quantile(0.5, "vllm:inter_token_latency_seconds"), "ITL p50"),
                    (quantile(0.95, "vllm:inter_token_latency_seconds"), "ITL p95"),
                ),
                "s",
            ),
        ),
    ),
    (
        "Predictions",
        (
            Panel(
                "Tokens: predicted over actual",
                "What the controller expected of the steps it learned from, over what they gave.",
                ((share("predicted_tokens_total", "foreseen_tokens_total"), "tokens"),),
            ),
            Panel(
                "Time: predicted over actual",
                "For steps of decoding alone; and the median relative error of the last 128.",
                (
                    (
                        share("predicted_step_seconds_total", "foreseen_step_seconds_total"),
                        "predicted over actual",
                    ),
                    (highest("step_time_error_ratio", "engine"), "median error, engine {{engine}}"),
                ),
            ),
            Panel(
                "Predicted speed-up",
                "Over no speculation, as the controller expects it; under 1 speculation costs.",
                ((_SPEED_UP, "speed-up"),),
            ),
        ),
    ),
    (
        "Faults",
        (
            Panel(
                "Proposer errors",
                "Steps in which the proposer failed and drafted nothing.",
                ((rate("proposer_errors_total"), "errors a second"),),
                width=12,
            ),
            Panel(
                "Switched off",
                "1: the proposer or the controller is off after faults until the engine restarts.",
                ((highest("disabled", "instance, engine, part"), "{{instance}} {{part}}"),),
                width=12,
                top=1.0,
            ),
        ),
    ),
)


def panels() -> list[Panel]:
    """All of them."""
    return [panel for _, row in ROWS for panel in row]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it (schemaVersion 39)."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        x, y = 0, y + 1
        height = 5 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.width > 24:
                x, y = 0, y + height
            where = {"x": x, "y": y, "w": panel.width, "h": height}
            placed.append(_panel(panel, len(placed) + 1, where))
            x += panel.width
        y += height
    return {
        "title": "vLLM speculative decoding (vllm_specx)",
        "uid": "vllm-specx",
        "description": "Speculation under vllm_specx: acceptance, draft length, bubble, time.",
        "tags": ["vllm", "vllm_specx"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "tags": ["vllm"],
                "title": "vLLM",
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": _variables()},
        "panels": placed,
    }


def _panel(panel: Panel, number: int, where: dict[str, int]) -> dict[str, Any]:
    steps = [{"color": color, "value": value} for color, value in panel.limits]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "noValue": _NONE,
        "mappings": [
            {"type": "special", "options": {"match": "null+nan", "result": {"text": _NONE}}}
        ],
        "thresholds": {
            "mode": "absolute",
            "steps": steps or [{"color": "green", "value": None}],
        },
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    heat = panel.kind == "heatmap"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.about} Reads {', '.join(panel.metrics)}.",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": where,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "expr": query,
                "legendFormat": legend,
                "format": "heatmap" if heat else "time_series",
                "editorMode": "code",
                "range": True,
            }
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        return {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if kind == "heatmap":
        return {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64},
            "yAxis": {"unit": "short"},
            "cellGap": 1,
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _variables() -> list[dict[str, Any]]:
    steps = f"{PREFIX}decode_steps_total"
    chosen = {
        "job": steps,
        "model_name": f'{steps}{{job=~"$job"}}',
        "instance": f'{steps}{{job=~"$job",model_name=~"$model_name"}}',
        "engine": f'{steps}{{job=~"$job",model_name=~"$model_name",instance=~"$instance"}}',
    }
    variables: list[dict[str, Any]] = [
        {
            "name": "datasource",
            "label": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "refresh": 1,
        }
    ]
    for name, series in chosen.items():
        query = f"label_values({series}, {name})"
        variables.append(
            {
                "name": name,
                "label": name,
                "type": "query",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "definition": query,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "sort": 1,
                "includeAll": True,
                "allValue": ".*",
                "multi": True,
                "current": {"text": "All", "value": "$__all"},
                "options": [],
                "hide": 0,
            }
        )
    return variables


def text() -> str:
    """What dashboard.json holds."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    print(f"{FILE.name}: {len(panels())} panels", file=sys.stderr)

"""What each way to choose K would reach: the same requests, the same step times, one server each.

The controller is the one that serves (control/controller.py), fed with noisy times; what is counted is
without noise.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specx.control.controller import Controller
from vllm_specx.control.cost import CostModel, CostPrior
from vllm_specx.control.nodes import Times, best_sizes
from vllm_specx.control.policy import rule_for
from vllm_specx.plan.curves import Curve
from vllm_specx.plan.scenario import Levels, Poisson, Recorded, Simulation, Work
from vllm_specx.plan.scenario import Trees as TreeKeys
from vllm_specx.plan.trees import Shape, rank_table

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NONE, TABLE, CONTROLLER = "none", "batch table", "controller"
NODES = "nodes"
"""Chain, tree or nothing, by what each node is worth (control/nodes.py)."""
_RANGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. after: seconds, or with levels its level."""

    after: float
    work: str
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Result:
    """What one policy reached.

    tokens_per_second: of decode steps, prefill not counted. total_tokens_per_second: of all time
    in which there was work. token_ms, token_p95_ms: time per output token over requests.
    """

    policy: str
    tokens: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    token_ms: float = 0.0
    token_p95_ms: float = 0.0
    by_batch: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    history: list[tuple[float, int, float]] = field(default_factory=list)
    """[seconds, batch, mean K] of each step."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        seconds = self.decode_seconds + self.prefill_seconds
        return self.tokens / seconds if seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "total_tokens_per_second": round(self.total_tokens_per_second, 2),
            "token_ms": round(self.token_ms, 3),
            "token_p95_ms": round(self.token_p95_ms, 3),
            "tokens": self.tokens,
            "steps": self.steps,
            "drafted_a_step": round(self.drafted / max(self.steps, 1), 3),
            "acceptance_rate": round(self.accepted / self.drafted, 4) if self.drafted else None,
            "by_batch": {name: round(value, 2) for name, value in self.by_batch.items()},
            **self.details,
        }


def arrivals(scenario: Simulation) -> list[Arrival]:
    """The requests, the same for every policy; output lengths vary by a quarter."""
    source = scenario.arrivals
    if isinstance(source, Recorded):
        return [Arrival(*request) for request in sorted(source.requests)]
    random = np.random.default_rng(scenario.seed)
    names = list(scenario.mix or scenario.work)
    shares = np.array([scenario.mix.get(name, 1.0) for name in names])
    if isinstance(source, Poisson):
        after = random.exponential(1 / source.per_second, source.requests).cumsum().tolist()
    else:
        after = [float(i) for i, (_, count) in enumerate(source.levels) for _ in range(count)]
    chosen = random.choice(len(names), len(after), p=shares / shares.sum())
    lengths = random.uniform(0.75, 1.25, len(after))
    return [
        Arrival(
            when,
            names[which],
            scenario.work[names[which]].prompt_tokens,
            max(1, round(scenario.work[names[which]].output_tokens * length)),
        )
        for when, which, length in zip(after, chosen.tolist(), lengths.tolist(), strict=True)
    ]


def survival(work: Work, depth: int) -> tuple[FloatArray, FloatArray]:
    """Probability by depth that a token is drafted and accepted, and that it is drafted."""
    rates = np.array([work.acceptance[min(d, len(work.acceptance) - 1)] for d in range(depth)])
    drafted = np.full(depth, work.drafted)
    if work.draft_length is not None:
        drafted *= (1 - 1 / max(work.draft_length, 1.0)) ** np.arange(depth)
    return np.cumprod(rates) * drafted, drafted


def best_table(scenario: Simulation, curve: Curve) -> list[tuple[int, int, int]]:
    """vLLM's table [first batch, last batch, K]: the best K for the mix, as it is known here."""
    names = scenario.mix or {name: 1.0 for name in scenario.work}
    shares = np.array(list(names.values())) / sum(names.values())
    chains = [survival(scenario.work[name], scenario.max_k) for name in names]
    gains = sum(s * gain for s, (gain, _) in zip(shares, chains, strict=True))
    spends = sum(s * spend for s, (_, spend) in zip(shares, chains, strict=True))
    tokens = 1 + np.concatenate([[0.0], np.cumsum(gains)])
    drafts = np.concatenate([[0.0], np.cumsum(spends)])
    works = [scenario.work[name] for name in names]
    context = float(
        sum(s * (w.prompt_tokens + w.output_tokens / 2) for s, w in zip(shares, works, strict=True))
    )
    table = []
    for first, following in zip(_RANGES, (*_RANGES[1:], 2048), strict=True):
        if first > scenario.max_requests:
            break
        last = min(following - 1, scenario.max_requests)
        middle = (first + last) // 2
        goodput = [
            tokens[k]
            / curve.decode(
                middle, middle * drafts[k], middle * context, max(k, scenario.least_draft_steps)
            )
            for k in range(scenario.max_k + 1)
        ]
        table.append((first, last, int(np.argmax(goodput))))
    return table


class Server:
    """One server that works off the requests with one policy."""

    def __init__(
        self, scenario: Simulation, policy: str, choose: Callable[[int], int] | None
    ) -> None:
        """choose: K by batch size; None: the controller."""
        self.scenario = scenario
        self.curve = scenario.curve()
        self.choose = choose
        self.result = Result(policy)
        depth = scenario.max_k
        self.works = list(scenario.work.values())
        self.index = {name: i for i, name in enumerate(scenario.work)}
        before = [_rates(w.acceptance, depth) for w in self.works]
        after = [_rates(w.shift.acceptance if w.shift else w.acceptance, depth) for w in self.works]
        self.rates = np.stack([before, after])
        self.shift_at = np.array([w.shift.after if w.shift else 1 << 30 for w in self.works])
        self.drafted = np.array([w.drafted for w in self.works])
        self.length = np.array([w.draft_length or 0.0 for w in self.works])
        self.random = np.random.default_rng(scenario.seed + 1)
        self.noise = np.random.default_rng(scenario.seed + 2)
        self.control_seconds = 0.0
        self.controller = None if choose else self._controller()

    def _controller(self) -> Controller:
        scenario = self.scenario
        return Controller(
            scenario.controller,
            scenario.max_k,
            max_requests=scenario.max_requests,
            prior=self._prior(),
            varying=scenario.varying,
            least_draft_steps=scenario.least_draft_steps,
        )

    def _prior(self) -> CostPrior:
        scenario = self.scenario
        weights = 270e6
        if scenario.cost.kind == "roofline":
            weights = scenario.cost.model.transformer().weight_bytes / scenario.cost.gpus
        on_gpu = scenario.cost.kind == "roofline"
        return CostPrior.from_model(weights, on_gpu, draft_share=scenario.draft_share)

    def run(self, requests: Sequence[Arrival]) -> Result:
        """Serve all requests."""
        result, scenario = self.result, self.scenario
        count = len(requests)
        work = np.array([self.index[r.work] for r in requests])
        prompt = np.array([r.prompt_tokens for r in requests])
        wanted = np.array([r.output_tokens for r in requests])
        made = np.zeros(count, np.int64)
        began, ended = np.zeros(count), np.zeros(count)
        ids = [f"request-{i}" for i in range(count)]
        levels = scenario.arrivals.levels if isinstance(scenario.arrivals, Levels) else None
        active: IntArray = np.zeros(0, np.int64)
        now, coming = 0.0, 0
        least = 0 if result.policy == NONE else scenario.least_draft_steps
        batches: dict[int, list[float]] = {}
        while coming < count or len(active):
            joined: list[int] = []
            while coming < count and len(active) + len(joined) < scenario.max_requests:
                request = requests[coming]
                if levels is not None:
                    if len(active) + len(joined) >= levels[int(request.after)][0]:
                        break
                elif request.after > now:
                    if len(active) or joined:
                        break
                    now = request.after
                joined.append(coming)
                coming += 1
            seconds = self.curve.prefill(int(prompt[joined].sum())) if joined else 0.0
            result.prefill_seconds += seconds
            size = len(active)
            if size:
                left = (wanted - made)[active]
                context = float((prompt + made)[active].sum())
                regime = (made[active] >= self.shift_at[work[active]]).astype(int)
                k, offered, hits, decode, steps = self._decode(
                    ids, active, work[active], regime, left, context, least
                )
                kept = np.minimum(hits + 1, left)
                self._learn(
                    ids, active, k, offered, hits, kept, decode + seconds, not joined, steps
                )
                result.decode_seconds += decode
                result.steps += 1
                result.drafted += int(offered.sum())
                result.accepted += int(hits.sum())
                result.tokens += int(kept.sum())
                made[active] += kept
                seen = batches.setdefault(size, [0.0, 0.0])
                seen[0] += kept.sum()
                seen[1] += decode
                seconds += decode
                result.history.append((now, size, float(k.mean())))
            now += seconds
            if size:
                done = made[active] >= wanted[active]
                ended[active[done]] = now
                if self.controller is not None:
                    for i in active[done].tolist():
                        self.controller.remove(ids[i])
                active = active[~done]
            for i in joined:
                began[i] = now
                self._add(ids[i], requests[i])
            active = np.concatenate([active, np.array(joined, np.int64)])
        per_token = 1000 * (ended - began) / np.maximum(wanted, 1)
        result.token_ms = float(per_token.mean())
        result.token_p95_ms = float(np.percentile(per_token, 95))
        result.by_batch = _by_range(batches)
        if self.controller is not None:
            stats = self.controller.stats()
            stats["control_us_a_step"] = 1e6 * self.control_seconds / max(result.steps, 1)
            result.details["controller"] = {k: round(float(v), 6) for k, v in stats.items()}
        return result

    def _add(self, request_id: str, request: Arrival) -> None:
        if self.controller is not None:
            work = self.scenario.work[request.work]
            extra = {"specx_scenario": work.label} if work.label else None
            rule = rule_for(extra, work.temperature, self.scenario.max_k)
            self.controller.add(request_id, rule)

    def _decode(
        self,
        ids: Sequence[str],
        active: IntArray,
        work: IntArray,
        regime: IntArray,
        left: IntArray,
        context: float,
        least: int,
    ) -> tuple[IntArray, IntArray, IntArray, float, int]:
        """One step of the requests `active`: K, tokens drafted and accepted [B], seconds, draft steps."""
        k = self._k(ids, active, left)
        offered = self._offers(k, work)
        chance = self.rates[regime, work]
        hits = (self.random.random(chance.shape) < chance).cumprod(1).sum(1)
        hits = np.minimum(hits, offered)
        steps = max(int(k.max()), least)
        decode = self.curve.decode(len(active), float(offered.sum()), context, steps)
        return k, offered, hits, decode, steps

    def _k(self, ids: Sequence[str], active: IntArray, left: IntArray) -> IntArray:
        limits = np.minimum(left - 1, self.scenario.max_k)
        if self.controller is None:
            assert self.choose is not None
            return np.asarray(np.minimum(self.choose(len(active)), limits))
        start = clock.perf_counter()
        decision = self.controller.decide([ids[i] for i in active.tolist()], limits=limits)
        self.control_seconds += clock.perf_counter() - start
        return np.asarray(np.minimum(decision.k, limits), np.int64)

    def _offers(self, k: IntArray, work: IntArray) -> IntArray:
        lengths = self.length[work]
        drawn = self.random.geometric(1 / np.maximum(lengths, 1.0))
        offers = np.where(lengths > 0, drawn, k)
        has = self.random.random(len(k)) < self.drafted[work]
        return np.where(has, np.minimum(offers, k), 0)

    def _learn(
        self,
        ids: Sequence[str],
        active: IntArray,
        k: IntArray,
        offered: IntArray,
        hits: IntArray,
        kept: IntArray,
        seconds: float,
        pure: bool,
        draft_steps: int,
    ) -> None:
        noise = self.scenario.noise
        factor = float(np.exp(self.noise.normal(0.0, noise.spread)))
        if self.noise.random() < noise.outliers:
            factor *= noise.outlier_factor
        if self.controller is None:
            return
        start = clock.perf_counter()
        self.controller.observe(
            [ids[i] for i in active.tolist()],
            drafted=offered,
            accepted=hits,
            kept=kept,
            offered=offered if self.scenario.varying else None,
            allowed=k if self.scenario.varying else None,
            seconds=seconds * factor,
            pure_decode=pure,
            draft_steps=draft_steps,
        )
        self.control_seconds += clock.perf_counter() - start


class TreeServer(Server):
    """One that drafts trees: of a fixed size, or as many nodes as pay."""

    def __init__(
        self, scenario: Simulation, keys: TreeKeys, policy: str, nodes: int | None = None
    ) -> None:
        """nodes: of every tree; None: chosen each step, chains and nothing among the choices, from the times
        that are measured."""
        super().__init__(scenario, policy, lambda batch: 0)
        self._keys, self._nodes = keys, nodes
        most = max(keys.nodes) if nodes is None else nodes
        # By kind of work: chains of each length, then trees of each depth.
        self._shapes: list[list[Shape]] = []
        self._steps: list[int] = []
        for branching in (1, keys.branching):
            for depth in range(1, keys.depth + 1):
                if nodes is not None and (branching == 1 or depth < keys.depth):
                    continue
                tables = [rank_table(work, depth, branching) for work in self.works]
                self._shapes.append([Shape(table, most) for table in tables])
                self._steps.append(depth)
        self._chains = len(self._shapes) - keys.depth if nodes is None else 0
        self._cost = CostModel(
            scenario.max_requests, scenario.max_requests * (1 + most), self._prior()
        )

    def _decode(
        self,
        ids: Sequence[str],
        active: IntArray,
        work: IntArray,
        regime: IntArray,
        left: IntArray,
        context: float,
        least: int,
    ) -> tuple[IntArray, IntArray, IntArray, float, int]:
        size = len(active)
        start = clock.perf_counter()
        which, nodes = self._choose(work, np.maximum(left - 1, 0))
        self.control_seconds += clock.perf_counter() - start
        shapes = self._shapes[which] if which >= 0 else []
        draws = self.random.random((size, self._keys.depth)).tolist()
        hits = np.zeros(size, np.int64)
        for i in np.flatnonzero(nodes).tolist():
            hits[i] = shapes[work[i]].accepted(int(nodes[i]), draws[i])
        # What is at most kept is no more than what the request has left.
        hits = np.minimum(hits, np.maximum(left - 1, 0))
        steps = max(self._steps[which] if which >= 0 else 0, least)
        tree = which >= self._chains
        width = self._keys.branching if tree else 1
        seconds = self.curve.decode(size, float(nodes.sum()), context, steps, width)
        factor = 1.0 + self._keys.overhead if tree and nodes.any() else 1.0
        noise = float(np.exp(self.noise.normal(0.0, self.scenario.noise.spread)))
        if self.noise.random() < self.scenario.noise.outliers:
            noise *= self.scenario.noise.outlier_factor
        # What trees cost more is known: it is a property of the kernel.
        self._cost.observe(size, size + int(nodes.sum()), seconds * noise, steps)
        return nodes, nodes, hits, seconds * factor, steps

    def _choose(self, work: IntArray, limits: IntArray) -> tuple[int, IntArray]:
        if self._nodes is not None:
            sizes = np.array([len(self._shapes[0][w].gains) for w in work])
            return 0, np.minimum(np.minimum(self._nodes, sizes), limits)
        size, cost = len(work), self._cost
        gains = []
        for shapes in self._shapes:
            longest = max(len(shape.gains) for shape in shapes)
            padded = np.zeros((len(shapes), longest))
            for row, shape in zip(padded, shapes, strict=True):
                row[: len(shape.gains)] = shape.gains
            gains.append(padded[work])

        def timed(factor: float) -> Times:
            return lambda n, steps: (
                factor * (cost.cautious(size, n) + cost.draft_step(size) * steps)
            )

        plain, tree = timed(1.0), timed(1.0 + self._keys.overhead)
        times = [plain if i < self._chains else tree for i in range(len(gains))]
        nothing = cost.time(size, size, self.scenario.least_draft_steps)
        chosen = best_sizes(gains, self._steps, limits, times, nothing)
        return chosen.which, chosen.nodes


def simulate(scenario: Simulation, progress: Callable[[str], object] = str) -> list[Result]:
    """Run every policy. progress is told the name of each before it starts."""
    requests = arrivals(scenario)
    results = []

    def serve(name: str, choose: Callable[[int], int] | None) -> Result:
        progress(name)
        return Server(scenario, name, choose).run(requests)

    results.append(serve(NONE, lambda batch: 0))
    ks = [k for k in sorted(set(scenario.static_k)) if k <= scenario.max_k]
    for k in ks:
        results.append(serve(f"K={k}", lambda batch, k=k: k))  # type: ignore[misc]
    tables = (best_table(scenario, scenario.curve()), _table_from(results, [0, *ks]))
    tried = []
    for table in tables:
        tried.append(serve(TABLE, lambda batch, table=table: _look_up(table, batch)))  # type: ignore[misc]
        tried[-1].details["table"] = table
    results.append(max(tried, key=lambda result: result.tokens_per_second))
    results.append(serve(CONTROLLER, None))
    if scenario.tree is not None:
        for size in sorted(set(scenario.tree.nodes)):
            progress(f"tree {size}")
            results.append(TreeServer(scenario, scenario.tree, f"tree {size}", size).run(requests))
        progress(NODES)
        results.append(TreeServer(scenario, scenario.tree, NODES).run(requests))
    return results


def _table_from(results: Sequence[Result], ks: Sequence[int]) -> list[tuple[int, int, int]]:
    """The table of the K that was fastest in each range of batch sizes."""
    names = sorted(
        {name for r in results for name in r.by_batch}, key=lambda n: int(n.split("-")[0])
    )
    table = []
    for name in names:
        low, high = (int(part) for part in (*name.split("-"), *name.split("-"))[:2])
        rates = [result.by_batch.get(name, 0.0) for result in results]
        table.append((low, high, ks[rates.index(max(rates))]))
    return table


def _look_up(table: Sequence[tuple[int, int, int]], batch: int) -> int:
    """K of the range that holds the batch, or of the nearest one below."""
    k = table[0][2]
    for first, _, value in table:
        if first <= batch:
            k = value
    return k


def verdict(results: Sequence[Result]) -> dict[str, float]:
    """The controller's tokens/s over those of none, of the best static K, and of the table.

    And its time per output token as requests see it, which is what counts where requests come by
    themselves and a faster server has fewer of them at a time.
    """
    rates = {result.policy: result.tokens_per_second for result in results}
    static = max(rate for name, rate in rates.items() if name.startswith("K="))
    mine = rates[CONTROLLER]
    waits = {result.policy: result.token_ms for result in results}
    return {
        "over_none": round(mine / rates[NONE], 4),
        "over_best_static": round(mine / static, 4),
        "over_best_table": round(mine / rates[TABLE], 4),
        "token_time_over_none": round(waits[CONTROLLER] / waits[NONE], 4),
        "token_time_over_best_static": round(
            waits[CONTROLLER] / min(ms for name, ms in waits.items() if name.startswith("K=")), 4
        ),
        **_of_trees(rates),
    }


def _of_trees(rates: dict[str, float]) -> dict[str, float]:
    if NODES not in rates:
        return {}
    fixed = max(rate for name, rate in rates.items() if name.startswith("tree "))
    return {
        "best_tree_over_none": round(fixed / rates[NONE], 4),
        "nodes_over_none": round(rates[NODES] / rates[NONE], 4),
        "nodes_over_chains": round(rates[NODES] / rates[CONTROLLER], 4),
        "nodes_over_best_tree": round(rates[NODES] / fixed, 4),
    }


def _rates(acceptance: Sequence[float], depth: int) -> list[float]:
    return [acceptance[min(d, len(acceptance) - 1)] for d in range(depth)]


def _by_range(batches: dict[int, list[float]]) -> dict[str, float]:
    """Tokens/s by powers of two of the batch size."""
    sums: dict[tuple[int, int], list[float]] = {}
    for size, (tokens, seconds) in sorted(batches.items()):
        high = 1 << (size - 1).bit_length()
        entry = sums.setdefault((high // 2 + 1 if high > 1 else 1, high), [0.0, 0.0])
        entry[0] += tokens
        entry[1] += seconds
    return {
        (f"{low}-{high}" if low < high else str(high)): tokens / seconds
        for (low, high), (tokens, seconds) in sums.items()
    }

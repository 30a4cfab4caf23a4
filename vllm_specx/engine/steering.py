"""Between vLLM's scheduler and control/: who decodes, what was drafted, what came of it, how long.

Where a method drafts for nothing (n-gram, suffix) K is chosen after drafting, by cutting drafts;
where each draft token costs a forward, or drafts stay on the device (asynchronous scheduling), it
is chosen before; drafts that stay on the device are cut by verifying fewer of a request's. Our n-gram
lookahead chooses its lengths itself, token by token, from the step times that travel to it with the
scheduler's output (DraftPlan).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specx.control.controller import Controller
from vllm_specx.control.cost import CostPrior
from vllm_specx.control.policy import Rule, rule_for
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.engine.metrics import Meter
from vllm_specx.engine.plan import PLAN, DraftPlan
from vllm_specx.engine.v2.captured import nearest

logger = logging.getLogger(f"vllm.{__name__}")

VARYING = frozenset({"ngram", "suffix", "ngram_gpu"})
"""Stock methods that draft as many tokens as they find, at no cost on the device."""
FULL_K_ONLY = frozenset({"suffix"})
"""Stock methods that take no other K than num_speculative_tokens (they assert it)."""
FIRST_FORWARD = 1
"""Draft steps that vLLM runs at K=0 too, to keep the draft's cache filled."""
COSTS_KNOWN = 256
"""Draft tokens of a step up to which its cost is told to the worker."""
COSTS_EVERY = 8
"""Steps between two updates of those costs."""
_RESTS = 4
"""Steps without drafts that must have been measured in a batch of about this size."""
_REST_EVERY = 4
"""Until then, so many steps from one of them to the next."""
IDLE_SECONDS = 0.005
"""A pause longer than this between two steps is waiting for work, not a part of the step."""


@dataclass(slots=True)
class _Step:
    """What has to be known of a scheduled step when its output arrives."""

    started: float
    requests: dict[str, Any]
    """The requests that decode in it."""
    pure_decode: bool
    draft_steps: int
    reason: str
    """Of the K that is verified in it."""
    draft_seconds: float | None = None


@dataclass(slots=True)
class _Drafts:
    """Of one request: what was allowed and offered last, and the first token that was cut off."""

    allowed: int = 0
    offered: int = 0
    cut: int = -1


class Steering:
    """One a scheduler. Every method may raise; the scheduler switches it off then."""

    def __init__(
        self,
        settings: ControllerConfig,
        *,
        method: str,
        self_paced: bool,
        rests: bool = False,
        idle_forwards: int | None = None,
        most_forwards: int | None = None,
        rungs: Sequence[int] = (),
        max_k: int,
        max_requests: int,
        asynchronous: bool,
        prior: CostPrior,
        meter: Meter | None = None,
    ) -> None:
        """method: vLLM's name; self_paced: the proposer chooses lengths by the costs it is told; rests:
        by what its forwards cost, too, so that steps without any have to be measured; idle_forwards:
        draft steps at K=0, by default what the method is known to run; most_forwards: see
        Controller.most_draft_steps; rungs: one K for all is one of these, if any."""
        self.method = method
        self.self_paced = self_paced
        self.max_k = max_k
        self.asynchronous = asynchronous
        self.cuts = not asynchronous and not self_paced
        self.after_drafting = self.cuts and method in VARYING
        if idle_forwards is None:
            idle_forwards = 0 if self_paced or method in VARYING else FIRST_FORWARD
        self.controller = Controller(
            settings,
            max_k,
            max_requests=max_requests,
            prior=prior,
            varying=self_paced or method in VARYING,
            least_draft_steps=idle_forwards,
            most_draft_steps=most_forwards,
        )
        self._steps: dict[int, _Step] = {}
        self._drafts: dict[str, _Drafts] = {}
        self._chosen: dict[str, int] = {}
        self._ended = 0.0
        self._costs: npt.NDArray[np.float64] | None = None
        self._costs_for = (-1, -1)
        self._settings = settings
        self._limits: dict[str, int] = {}
        self._rungs = rungs
        self._fixed: set[str] = set()
        self._most_forwards = max_k if most_forwards is None else most_forwards
        self._gone: list[str] = []
        self._untold: tuple[_Step, Callable[[], None]] | None = None
        # Of drafts with a window beside them: how many tokens are none of its rows.
        self._candidates: dict[str, int] = {}
        self._may_rest = (
            rests and settings.enabled and settings.static_k is None and not settings.k_min
        )
        self._crowded = 0
        self._meter = meter or Meter(counting=False)
        self._reason = "batch"
        self._decided_for: list[str] = []

    # Requests

    def add(self, request: Any) -> None:
        """A new request."""
        self._forget()
        params = request.sampling_params
        extra = None if params is None else params.extra_args
        temperature = None if params is None else params.temperature
        rule = rule_for(extra, temperature, self.max_k)
        if params is not None and params.seed is not None and temperature and rule.fixed_k is None:
            # vLLM's rejection sampler uses up a request's random numbers by its drafts: a seed gives
            # the same text again only where K does not follow the clock.
            rule = replace(rule, fixed_k=self.max_k)
        self.controller.add(request.request_id, rule)
        self._meter.add(request.request_id, rule.pool)
        self._limits[request.request_id] = self._limit(rule)
        if rule.fixed_k is not None:
            self._fixed.add(request.request_id)

    def _limit(self, rule: Rule) -> int:
        settings = self._settings
        limit = self.max_k if settings.k_max is None else min(settings.k_max, self.max_k)
        if settings.static_k is not None:
            limit = min(settings.static_k, self.max_k)
        return limit if rule.fixed_k is None else min(rule.fixed_k, limit)

    def remove(self, request_id: str) -> None:
        """It has ended; its last step may still have to be learned from."""
        self._gone.append(request_id)

    def _forget(self) -> None:
        for request_id in self._gone:
            self.controller.remove(request_id)
            self._meter.remove(request_id)
            self._drafts.pop(request_id, None)
            self._candidates.pop(request_id, None)
            self._limits.pop(request_id, None)
            self._fixed.discard(request_id)
        self._gone.clear()

    # A step

    def scheduled(self, output: Any, requests: dict[str, Any], started: float) -> None:
        """A step is about to run: remember it, and decide how much is drafted at its end."""
        self.took(0)
        spec = output.scheduled_spec_decode_tokens
        decoding: dict[str, Any] = {}
        samples: list[str] = []
        pure = True
        for request_id, count in output.num_scheduled_tokens.items():
            request = requests[request_id]
            if count == 1 + len(spec.get(request_id, ())) and request.num_output_tokens > 0:
                decoding[request_id] = request
            else:
                pure = False
            done = request.num_computed_tokens + count
            if done >= request.num_tokens + request.num_output_placeholders:
                samples.append(request_id)
        reason = self._reason
        chosen = self._choose(output, samples, pure)
        self._steps[id(output)] = _Step(started, decoding, pure, chosen, reason)

    def _choose(self, output: Any, request_ids: list[str], pure_decode: bool) -> int:
        """Set K of the drafts that follow this step. Returns the draft steps it takes."""
        self._chosen = {}
        if not request_ids:
            return 0
        if self.self_paced or self.after_drafting:
            limits = {i: self._limits.get(i, self.max_k) for i in request_ids}
            self._reason = "proposer"
            if pure_decode and self._rests(len(limits)):
                limits = dict.fromkeys(limits, 0)
                self._reason = "rest"
            if self.method not in FULL_K_ONLY:
                output.num_spec_tokens_to_schedule = max(limits.values())
            if self.self_paced:
                costs = self._told(len(limits)) if self._settings.enabled else None
                draft_cost = None if costs is None else self.controller.cost.draft_step(len(limits))
                setattr(output, PLAN, DraftPlan(limits, costs, draft_cost))
            return 0
        decision = self.controller.decide(request_ids)
        same = request_ids == self._decided_for
        self._reason = "probe" if decision.probe else "controller" if same else "batch"
        self._decided_for = request_ids
        self._chosen = dict(zip(request_ids, decision.k.tolist(), strict=True))
        steps = decision.uniform_k
        if self._rungs and decision.uniform and self._fixed.isdisjoint(request_ids):
            steps = nearest(self._rungs, steps)
            self._chosen = dict.fromkeys(request_ids, steps)
        output.num_spec_tokens_to_schedule = steps
        return min(max(steps, self.controller.least_draft_steps), self._most_forwards)

    def _rests(self, batch: int) -> bool:
        """Whether nothing is drafted now, to learn what a step without drafts takes: if every step of
        such a batch had some, nothing would show that they do not pay."""
        if not self._may_rest or self.controller.cost.visits(batch, batch) >= _RESTS:
            return False
        self._crowded += 1
        return self._crowded % _REST_EVERY == 0

    def _told(self, batch: int) -> npt.NDArray[np.float64] | None:
        cost = self.controller.cost
        if cost.observations < 8:
            return None
        now = (batch, self.controller.steps // COSTS_EVERY)
        if now != self._costs_for or self._costs is None:
            most = min(batch * self.max_k, COSTS_KNOWN)
            self._costs = cost.cautious(batch, most)
            self._costs_for = now
        return self._costs

    def placed(self, requests: dict[str, Any]) -> None:
        """vLLM has placed as many placeholders in each request as the largest K: cut them to each
        request's own. Asynchronous only; the worker takes a request's first drafts
        (gpu_model_runner.py `_prepare_input_ids`)."""
        if not self.asynchronous:
            return
        for request_id, k in self._chosen.items():
            request = requests[request_id]
            if len(request.spec_token_ids) > k:
                request.spec_token_ids = request.spec_token_ids[:k]

    def drafted(self, request_ids: Sequence[str], drafts: Sequence[list[int]]) -> list[list[int]]:
        """The drafts as they are to be verified: cut to each request's K. Synchronous only."""
        if self.after_drafting:
            offered = np.fromiter(map(len, drafts), np.int64, len(drafts))
            k = self.controller.decide(list(request_ids), offered=offered).k.tolist()
            limits = dict(zip(request_ids, k, strict=True))
        else:
            limits = self._chosen
        kept = []
        for request_id, draft in zip(request_ids, drafts, strict=True):
            limit = limits.get(request_id, len(draft))
            cut = draft[limit] if limit < len(draft) else -1
            # K before drafting is no opinion of the proposer's: what it offers is what it was asked.
            self._drafts[request_id] = _Drafts(
                self.max_k if self.after_drafting else limit, len(draft), cut
            )
            kept.append(draft[:limit])
            if cut >= 0 and self.after_drafting:
                self._reason = "controller"
        return kept

    def windows(
        self, request_ids: Sequence[str], drafts: Sequence[list[int]], rows: Mapping[str, int]
    ) -> None:
        """Of these drafts so many tokens, by request, are the rows of a window (plan.WINDOW_ROWS)."""
        if not rows and not self._candidates:
            return
        for request_id, draft in zip(request_ids, drafts, strict=True):
            self._candidates.pop(request_id, None)
            if request_id in rows:
                self._candidates[request_id] = max(len(draft) - rows[request_id], 0)

    def before_output(self, output: Any) -> dict[str, int]:
        """Output tokens of each request that decodes in the step, before its output is taken in."""
        step = self._steps.get(id(output))
        return {} if step is None else {i: r.num_output_tokens for i, r in step.requests.items()}

    def finished_step(
        self,
        output: Any,
        sampled: Sequence[Sequence[int]],
        rows: dict[str, int],
        before: dict[str, int],
    ) -> None:
        """A step's output was taken in: learn from it."""
        now = time.perf_counter()
        step = self._steps.pop(id(output), None)
        if step is None:
            self._forget()
            return
        waited = step.started - self._ended
        start = self._ended if waited < IDLE_SECONDS else step.started
        if self.asynchronous:
            start = max(self._ended, step.started)
        self._ended = now
        invalid = output.num_invalid_spec_tokens or {}
        ids, drafted, accepted, kept, offered, allowed, beyond = [], [], [], [], [], [], []
        beside = 0
        for request_id, request in step.requests.items():
            row = rows.get(request_id)
            tokens = sampled[row] if row is not None and sampled else ()
            if not len(tokens):
                continue
            length = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            length -= invalid.get(request_id, 0)
            hits = len(tokens) - 1
            rows_of_window = max(length - max(self._candidates.get(request_id, length), hits), 0)
            length -= rows_of_window
            beside += rows_of_window
            note = self._drafts.pop(request_id, None)
            ids.append(request_id)
            drafted.append(length)
            accepted.append(min(hits, length))
            kept.append(max(request.num_output_tokens - before[request_id], 0))
            offered.append(length if note is None else max(note.offered, length))
            allowed.append(length if note is None else note.allowed)
            known = note is not None and note.cut >= 0 and hits == length
            beyond.append(int(tokens[-1] == note.cut) if known and note is not None else -1)
        if ids:
            self._meter.step(ids, drafted, accepted, kept, now - start, step.reason)
            learn = partial(
                self._learn,
                step,
                ids,
                drafted,
                accepted,
                kept,
                offered,
                allowed,
                beyond,
                beside,
                now - start,
            )
            if self.self_paced:
                self._untold = step, learn
                return
            learn()
        self._forget()

    def took(self, draft_steps: int, seconds: float | None = None) -> None:
        """The step that has finished made so many forwards of our draft, in so many seconds: it is learned
        from now. Negative: its time says nothing (draft.proposer.Proposer.draft_steps)."""
        if self._untold is None:
            return
        step, learn = self._untold
        self._untold = None
        step.draft_steps, step.draft_seconds = max(draft_steps, 0), seconds
        step.pure_decode &= draft_steps >= 0
        learn()
        self._forget()

    def _learn(
        self,
        step: _Step,
        ids: list[str],
        drafted: list[int],
        accepted: list[int],
        kept: list[int],
        offered: list[int],
        allowed: list[int],
        beyond: list[int],
        beside: int,
        seconds: float,
    ) -> None:
        pure = step.pure_decode and len(ids) == len(step.requests)
        self.controller.observe(
            ids,
            drafted=drafted,
            accepted=accepted,
            kept=kept,
            offered=offered if self.after_drafting else None,
            allowed=allowed if self.after_drafting else None,
            beyond=beyond if self.cuts else None,
            seconds=seconds,
            pure_decode=pure,
            draft_steps=step.draft_steps,
            draft_seconds=step.draft_seconds,
            beside=beside,
        )
        self._meter.learned(self.controller, len(ids), sum(kept), seconds, pure)

    def close(self) -> None:
        """The scheduler shuts down."""
        self.controller.close()


def weight_bytes(model: str, dtype_bytes: int = 2) -> float:
    """Bytes of a checkpoint's weights, for the prior; a guess where it is no local folder."""
    folder = Path(model)
    sizes = (
        [file.stat().st_size for file in folder.glob("*.safetensors")] if folder.is_dir() else []
    )
    return float(sum(sizes)) or 7e9 * dtype_bytes

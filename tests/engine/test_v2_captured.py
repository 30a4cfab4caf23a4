"""Each K that the controller chooses has a full CUDA graph for every batch: vLLM's own code says so, which
decides it before anything runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_specx.control.cost import CostPrior
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.engine.patching import original_of
from vllm_specx.engine.steering import Steering
from vllm_specx.engine.v2 import captured

Make = Callable[..., Any]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Make:
    """vLLM's graph manager as if everything were captured; (max_num_seqs, max_k, table, completed)."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(
        cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)
    )
    manager_of = cudagraph_utils.CudaGraphManager
    init = original_of(manager_of._init_candidates)

    def make(requests: int, max_k: int, table: Any, completed: bool = True) -> Any:
        compilation = CompilationConfig()
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_num_of_warmups = 1
        speculative = SimpleNamespace(
            num_speculative_tokens_per_batch_size=table,
            uses_dynamic_speculative_decoding=lambda: table is not None,
        )
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=8192),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=speculative,
            num_speculative_tokens=max_k,
            uniform_decode_query_len=1 + max_k,
            performance_mode="balanced",
        )
        sizes = original_of(VllmConfig._set_cudagraph_sizes)
        sizes(vllm_config)

        def candidates(manager: Any) -> None:
            (captured.complete_candidates(init, manager) if completed else init(manager))

        monkeypatch.setattr(manager_of, "_init_candidates", candidates)
        made = manager_of(
            vllm_config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, 1 + max_k
        )
        made._graphs_captured = True
        return made

    return make


def without(manager: Any, ks: list[int], requests: int) -> list[tuple[int, int]]:
    """(K, batch) without a full graph, though its tokens, rounded up as vLLM rounds them, are within what
    is captured."""
    most = manager.compilation_config.max_cudagraph_capture_size
    found = []
    for k in ks:
        for batch in range(1, requests + 1):
            tokens = batch * (1 + k)
            step = 16 if most > 256 else 0
            if tokens + step + (1 + k if step else 0) <= most - most % (1 + k):
                desc = manager.dispatch(batch, tokens, 1 + k, 0, 1 + k)
                if desc.cg_mode != CUDAGraphMode.FULL:
                    found.append((k, batch))
    return found


@pytest.mark.parametrize("requests", [16, 64, 256])
@pytest.mark.parametrize("max_k", [1, 4, 5, 32])
def test_each_k_has_full_graphs(graphs: Make, requests: int, max_k: int) -> None:
    ks = captured.rungs(ControllerConfig(), max_k)
    assert {0, 1, max_k} <= set(ks)
    manager = graphs(requests, max_k, captured.table_of(ks, requests))
    assert without(manager, ks, requests) == []
    full = manager._capture_descs[CUDAGraphMode.FULL]
    assert len(full) == len(set(full)) < 90 * len(ks)


def test_without_the_table_other_ks_have_none(graphs: Make) -> None:
    manager = graphs(64, 4, None)
    missing = without(manager, [0, 1, 2, 3, 4], 64)
    assert {k for k, _ in missing} == {0, 1, 2, 3}


def test_without_the_seam_some_batches_have_none(graphs: Make) -> None:
    ks = captured.rungs(ControllerConfig(), 4)
    manager = graphs(64, 4, captured.table_of(ks, 64), completed=False)
    assert without(manager, ks, 64) != []


@pytest.mark.parametrize(
    ("controller", "max_k", "ks"),
    [
        ({}, 4, [0, 1, 2, 3, 4]),
        ({}, 6, [0, 1, 2, 3, 4, 6]),
        ({}, 32, [0, 1, 2, 3, 4, 8, 16, 32]),
        ({"k_max": 2}, 8, [0, 1, 2]),
        ({"static_k": 3}, 8, [0, 3]),
        ({"static_k": 8}, 8, []),
        ({"enabled": False}, 8, []),
    ],
)
def test_the_ks_that_are_captured(controller: dict[str, Any], max_k: int, ks: list[int]) -> None:
    assert sorted(captured.rungs(ControllerConfig(**controller), max_k)) == ks


def test_the_table_names_each_k_whatever_may_run() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    ks = captured.rungs(ControllerConfig(), 32)
    for requests in (8, 37, 256, None):
        table = captured.table_of(ks, requests)
        lookup = build_dynamic_sd_schedule_lookup(table, requests or 512, 32)
        assert set(lookup[1:]) == set(ks)
    few = build_dynamic_sd_schedule_lookup(captured.table_of(ks, 2), 2, 32)
    assert set(few[1:]) == {32, 0}


@pytest.mark.parametrize(
    ("k", "taken"), [(0, 0), (1, 1), (5, 4), (6, 8), (11, 8), (13, 16), (32, 32)]
)
def test_one_k_for_all_is_the_nearest_that_has_graphs(k: int, taken: int) -> None:
    assert captured.nearest([32, 0, 1, 2, 4, 3, 8, 16], k) == taken
    assert captured.nearest([], k) == k


def test_fewer_tokens_are_asked_of_a_draft_than_of_both() -> None:
    given = SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 1, 32), (2, 2, 2)])
    with captured.cut_to(given, 4):
        assert given.num_speculative_tokens_per_batch_size == [(1, 1, 4), (2, 2, 2)]
    assert given.num_speculative_tokens_per_batch_size == [(1, 1, 32), (2, 2, 2)]


@pytest.mark.parametrize(("extra", "taken"), [({}, 8), ({"specx_k": 5}, 5)])
def test_the_scheduler_takes_a_k_that_has_graphs(extra: dict[str, Any], taken: int) -> None:
    """k_min leaves 6 and more; what a client asks for stays."""
    settings = ControllerConfig(k_min=6, k_max=7)
    steering = Steering(
        settings,
        method="custom_class",
        self_paced=False,
        rungs=[8, 0, 1, 2, 4, 3],
        max_k=8,
        max_requests=4,
        asynchronous=True,
        prior=CostPrior.from_model(1e9, True, draft_share=0.02),
    )
    params = SimpleNamespace(extra_args=extra, temperature=0.0, seed=None)
    steering.add(SimpleNamespace(request_id="a", sampling_params=params))
    output = SimpleNamespace(num_spec_tokens_to_schedule=None)
    steps = steering._choose(output, ["a"], True)
    assert output.num_spec_tokens_to_schedule == taken == steps
    assert steering._chosen == {"a": taken}

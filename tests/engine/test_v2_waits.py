"""A decode step's drafting waits for the device nowhere: PyTorch says what it is asked to do.

Kernels of Triton are launched, not run: a launch copies nothing and returns at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.waits import counted
from vllm_specx import config
from vllm_specx.draft.checkpoints import TargetShape, load_heads
from vllm_specx.draft.medusa_device import DeviceHeads
from vllm_specx.engine.v2 import auto_eagle, ngram_kernels, pool_kernels
from vllm_specx.engine.v2.auto import AutoSpeculator, TwoSources
from vllm_specx.engine.v2.auto_eagle import AutoEagleSpeculator
from vllm_specx.engine.v2.medusa import MedusaSpeculator
from vllm_specx.engine.v2.ngram import NgramSpeculator

HEADS = Path(__file__).parents[2] / "recipes" / "heads"
VOCAB, HIDDEN, ROWS, MAX_K, BATCH = 49152, 576, 8, 6, 3
KERNELS = [
    (ngram_kernels, "_insert_kernel"),
    (ngram_kernels, "_look_up_kernel"),
    (pool_kernels, "_write_kernel"),
    (pool_kernels, "_index_kernel"),
    (pool_kernels, "_look_up_kernel"),
]


class Launches:
    """In the place of a kernel: counts its launches."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.count += 1

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, made)
    return made


@pytest.fixture
def gpu() -> torch.device:
    """Stands for one: tensors there have no values that the host could read."""
    return torch.device("meta")


def configured(specx: dict[str, Any]) -> Any:
    return SimpleNamespace(
        additional_config={"specx": specx},
        speculative_config=SimpleNamespace(num_speculative_tokens=MAX_K),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=512),
    )


def states(device: torch.device) -> Any:
    def on_device(*shape: int) -> Any:
        return SimpleNamespace(gpu=torch.zeros(*shape, dtype=torch.int32, device=device))

    return SimpleNamespace(
        all_token_ids=on_device(ROWS, 512), total_len=on_device(ROWS), prompt_len=on_device(ROWS)
    )


def batch(device: torch.device) -> Any:
    return SimpleNamespace(
        num_reqs=BATCH,
        req_ids=[str(i) for i in range(BATCH)],
        idx_mapping=torch.zeros(BATCH, dtype=torch.int64, device=device),
        idx_mapping_np=np.arange(BATCH),
        logits_indices=torch.zeros(BATCH * (1 + MAX_K), dtype=torch.int64, device=device),
        cu_num_logits=torch.zeros(BATCH + 1, dtype=torch.int32, device=device),
    )


def heads(kind: str, device: torch.device) -> DeviceHeads:
    folder = HEADS / f"smollm2-135m-{kind}"
    weight = torch.zeros(VOCAB, HIDDEN, device=device)
    settings = config.MedusaConfig(heads=str(folder))
    loaded = load_heads(folder, TargetShape(HIDDEN, VOCAB, torch.float32))
    return DeviceHeads(settings, loaded, lm_head=weight, embeddings=weight)


def ngram(device: torch.device) -> Any:
    return NgramSpeculator(configured({"proposer": "ngram"}), device, states(device))


def medusa(kind: str) -> Callable[[torch.device], Any]:
    def make(device: torch.device) -> Any:
        made = object.__new__(MedusaSpeculator)
        made._prepare(configured({"proposer": "medusa", "heads": "H"}), device, states(device))
        made.use(heads(kind, device))
        return made

    return make


def auto(device: torch.device) -> Any:
    made = object.__new__(AutoSpeculator)
    made._prepare(configured({"proposer": "auto", "heads": "H"}), device, states(device))
    made.use(heads("medusa", device))
    return made


def auto_eagle_3(device: torch.device) -> Any:
    """What is ours of it: vLLM's own speculator drafts zeros here."""
    vllm_config = configured({"proposer": "auto", "heads": "H"})
    made = object.__new__(AutoEagleSpeculator)
    settings = config.AutoConfig(heads="H")
    made.num_speculative_steps, made.depth = MAX_K, 4
    made.both = TwoSources(settings, vllm_config, device, states(device))
    made.draft_tokens = torch.zeros(ROWS, MAX_K, dtype=torch.int64, device=device)
    made.drafts = torch.zeros_like(made.draft_tokens)
    made.guard = auto_eagle.Guard("auto")
    return made


SPECULATORS = {
    "ngram": ngram,
    "medusa": medusa("medusa"),
    "hydra": medusa("hydra"),
    "auto": auto,
    "auto with EAGLE-3": auto_eagle_3,
}


@pytest.fixture
def stock_eagle(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    monkeypatch.setattr(
        EagleSpeculator, "propose", lambda self, *args, **kwargs: self.draft_tokens[:BATCH]
    )


def propose(speculator: Any, device: torch.device, k: int) -> torch.Tensor:
    hidden = torch.zeros(BATCH * (1 + MAX_K), HIDDEN, device=device)
    sampled = torch.ones(BATCH, dtype=torch.int32, device=device)
    last = torch.zeros(ROWS, 1, dtype=torch.int64, device=device)
    drafts: torch.Tensor = speculator.propose(
        batch(device), None, None, hidden, None, sampled, sampled, last, num_speculative_tokens=k
    )
    return drafts


@pytest.mark.parametrize("name", SPECULATORS)
def test_nothing_waits(name: str, stock_eagle: None, launches: Launches, gpu: torch.device) -> None:
    speculator = SPECULATORS[name](gpu)
    with counted() as waits:
        for k in (0, 1, MAX_K):
            assert propose(speculator, gpu, k).shape == (BATCH, MAX_K)
    assert speculator.guard.faults == 0
    assert waits == []
    assert (launches.count > 0) == (name not in ("medusa", "hydra"))


@pytest.mark.parametrize("name", ["ngram", "auto", "auto with EAGLE-3"])
def test_requests_come_and_go_without_waiting(
    name: str, launches: Launches, gpu: torch.device
) -> None:
    speculator = SPECULATORS[name](gpu)
    params = SimpleNamespace(seed=None, temperature=0.0, extra_args={"specx_pool": "mine"})
    with counted() as waits:
        speculator.admit(2, params)
        speculator.end(2)
    assert waits == []
    assert launches.count == 2


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t[0].item(),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool((t > 0).any()),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", non_blocking=True),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.cpu().numpy(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "write by a mask": lambda t: t.__setitem__(t > 0, torch.zeros_like(t)),
    "copy to the host": lambda t: torch.zeros(t.shape, dtype=t.dtype).copy_(t),
    "copy from the host": lambda t: t.copy_(torch.zeros(t.shape, dtype=t.dtype)),
    "masked_select": lambda t: t.masked_select(t > 0),
}


@pytest.mark.parametrize("read", READS)
def test_what_waits_is_seen(
    read: str, launches: Launches, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test with a wait put into a speculator."""
    speculator = ngram(gpu)
    draft = speculator.draft

    def waiting(*args: Any) -> None:
        draft(*args)
        READS[read](speculator.index.matched)

    monkeypatch.setattr(speculator, "draft", waiting)
    monkeypatch.setattr(speculator.guard, "run", lambda step, nothing: step())
    with counted() as waits:
        propose(speculator, gpu, MAX_K)
    assert waits != []

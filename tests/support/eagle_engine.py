"""EAGLE drafts of random weights, a reference that recomputes everything, and an engine to feed them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional

from vllm_specx.draft.eagle import EagleDrafter
from vllm_specx.draft.eagle_config import EagleConfig
from vllm_specx.draft.eagle_weights import DecoderShape, EagleWeights, LayerWeights
from vllm_specx.draft.proposer import DraftContext, VerifiedRows
from vllm_specx.draft.tree import DraftTree
from vllm_specx.draft.vocab import DraftVocab

HIDDEN, VOCAB, AUX = 48, 90, 3
SHAPE = DecoderShape(
    hidden_size=HIDDEN,
    intermediate_size=64,
    heads=6,
    kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)
LENGTH = 400


def _random(*shape: int, scale: float = 0.3) -> torch.Tensor:
    return torch.randn(*shape) * scale


def target() -> tuple[torch.Tensor, torch.Tensor]:
    """lm_head and embeddings [VOCAB, HIDDEN]."""
    torch.manual_seed(5)
    return _random(VOCAB, HIDDEN, scale=1.0), _random(VOCAB, HIDDEN, scale=1.0)


def weights(version: Literal[1, 3], *, layers: int = 1, **changes: Any) -> EagleWeights:
    """A draft of random weights; changes: fields of EagleWeights, `bias` and `shape` for the layers."""
    torch.manual_seed(17 + version)
    shape: DecoderShape = changes.pop("shape", SHAPE)
    bias = changes.pop("bias", False)
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    made = []
    for n in range(layers):
        first = 2 * HIDDEN if version == 3 and n == 0 else HIDDEN
        made.append(
            LayerWeights(
                qkv=_random(wide, first),
                qkv_bias=_random(wide) if bias else None,
                out=_random(HIDDEN, shape.heads * shape.head_dim),
                gate_up=_random(2 * shape.intermediate_size, HIDDEN),
                down=_random(HIDDEN, shape.intermediate_size),
                input_norm=None if version == 1 and n == 0 else 1 + _random(HIDDEN),
                hidden_norm=1 + _random(HIDDEN) if version == 3 and n == 0 else None,
                post_norm=1 + _random(HIDDEN),
            )
        )
    fields: dict[str, Any] = {
        "version": version,
        "shape": shape,
        "fc": _random(HIDDEN, (2 if version == 1 else AUX) * HIDDEN),
        "fc_bias": _random(HIDDEN) if version == 1 else None,
        "fc_norms": (),
        "input_norm": None,
        "layers": tuple(made),
        "norm": 1 + _random(HIDDEN) if version == 3 else None,
        "lm_head": None,
        "embeddings": None,
        "vocab": None,
        "aux_layers": (1, 2, 3) if version == 3 else (),
    }
    return EagleWeights(**{**fields, **changes})


def cast(draft: EagleWeights, dtype: torch.dtype) -> EagleWeights:
    """The same draft in another dtype (without norms of the states)."""

    def changed(owner: Any) -> dict[str, Any]:
        return {name: part.to(dtype) for name, part in vars(owner).items() if torch.is_tensor(part)}

    layers = tuple(dataclasses.replace(layer, **changed(layer)) for layer in draft.layers)
    return dataclasses.replace(draft, layers=layers, **changed(draft))


def drafter(draft: EagleWeights, **changes: Any) -> EagleDrafter:
    """Drafts of full length unless said otherwise."""
    dtype = changes.pop("dtype", torch.float32)
    lm_head, embeddings = (tensor.to(dtype) for tensor in target())
    keys = {"min_probability": 0.0, **changes.pop("keys", {})}
    sizes = {"max_batch": 8, "max_model_len": LENGTH, "cache_tokens": 8 * LENGTH, **changes}
    return EagleDrafter(
        EagleConfig(heads="x", **keys), draft, lm_head=lm_head, embeddings=embeddings, **sizes
    )


def states_of(tokens: list[int], version: int) -> list[torch.Tensor]:
    """What a target would say: each [len(tokens), HIDDEN], a function of all tokens so far."""
    count = AUX if version == 3 else 1
    out = torch.empty(count, len(tokens), HIDDEN)
    seed = 7
    for i, token in enumerate(tokens):
        seed = (seed * 1000003 + token + 1) % (2**31)
        out[:, i] = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return list(out)


def _norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def _rotated(x: torch.Tensor, frequencies: torch.Tensor, first: int) -> torch.Tensor:
    angles = torch.arange(first, first + len(x))[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _layers(
    draft: EagleWeights,
    following: list[int],
    features: torch.Tensor,
    first: int,
    frequencies: torch.Tensor,
) -> torch.Tensor:
    """The output before the last norm [n, HIDDEN]: dense causal attention from `first` on."""
    eps, shape = draft.shape.rms_norm_eps, draft.shape
    rows = target()[1] if draft.embeddings is None else draft.embeddings
    embedded = rows[following]
    if draft.version == 1:
        assert draft.fc is not None
        h = torch.cat((embedded, features), -1) @ draft.fc.T
        h = h if draft.fc_bias is None else h + draft.fc_bias
    else:
        h = features
    for layer in draft.layers:
        if layer.hidden_norm is not None:
            assert layer.input_norm is not None
            normed = _norm(h, layer.hidden_norm, eps)
            h = normed if draft.norm_before_residual else h
            x = torch.cat((_norm(embedded, layer.input_norm, eps), normed), -1)
        else:
            x = h if layer.input_norm is None else _norm(h, layer.input_norm, eps)
        qkv = x @ layer.qkv.T
        qkv = qkv if layer.qkv_bias is None else qkv + layer.qkv_bias
        heads = qkv.view(len(x), -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        q, k = _rotated(q, frequencies, first), _rotated(k, frequencies, first)
        share = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
        h = h + seen @ layer.out.T
        gate, up = (_norm(h, layer.post_norm, eps) @ layer.gate_up.T).chunk(2, -1)
        h = h + (functional.silu(gate) * up) @ layer.down.T
    return h


def features_of(draft: EagleWeights, states: list[torch.Tensor]) -> torch.Tensor:
    """[n, HIDDEN]."""
    joined = torch.cat(states, -1)
    if draft.version == 1:
        return joined
    if draft.input_norm is not None:
        joined = _norm(joined, draft.input_norm, draft.shape.rms_norm_eps)
    if draft.fc_norms:
        parts = joined.chunk(len(draft.fc_norms), -1)
        eps = draft.shape.rms_norm_eps
        joined = torch.cat(
            [_norm(p, g, eps) for p, g in zip(parts, draft.fc_norms, strict=True)], -1
        )
    return joined if draft.fc is None else joined @ draft.fc.T


def reference(
    draft: EagleWeights,
    tokens: list[int],
    depth: int,
    *,
    start: int = 0,
    frequencies: torch.Tensor | None = None,
) -> list[int]:
    """The chain after `tokens`, of a draft that knows the features from `start` on."""
    lm_head = target()[0] if draft.lm_head is None else draft.lm_head
    if draft.vocab is not None and draft.lm_head is None:
        lm_head = lm_head[draft.vocab.token_ids]
    if frequencies is None:
        size = draft.shape.head_dim
        frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
    features = features_of(draft, states_of(tokens, draft.version))[start : len(tokens) - 1]
    following = tokens[start + 1 :]
    chain: list[int] = []
    for _ in range(depth):
        output = _layers(draft, following, features, start, frequencies)[-1:]
        normed = output
        if draft.norm is not None:
            normed = _norm(output, draft.norm, draft.shape.rms_norm_eps)
        best = int((normed @ lm_head.T).argmax())
        token = best if draft.vocab is None else int(draft.vocab.token_ids[best])
        chain.append(token)
        features = torch.cat((features, normed if draft.norm_output else output))
        following = [*following, token]
    return chain


@dataclasses.dataclass
class Told:
    """One request of a step: its tokens after the step, where the target began to read, how many it
    read, and how many it sampled."""

    name: str
    tokens: list[int]
    position: int
    read: int
    sampled: int = 1
    budget: int = 4


def context(told: list[Told], version: int, **changes: Any) -> DraftContext:
    """A step of the engine. Rejected drafts' rows hold nonsense, as a target's would."""
    size = len(told)
    table = np.zeros((size + 2, LENGTH), np.int32)
    rows = np.arange(size, dtype=np.int32)[::-1].copy() + 1
    parts: list[list[torch.Tensor]] = []
    count = np.zeros(size, np.int32)
    for i, each in enumerate(told):
        table[rows[i], : len(each.tokens)] = each.tokens
        count[i] = min(max(len(each.tokens) - 1 - each.position, 0), each.read)
        good = states_of(each.tokens[: each.position + count[i]], version)
        nonsense = torch.full((each.read - count[i], HIDDEN), 1e3)
        parts.append([torch.cat((s[each.position :], nonsense)) for s in good])
    read = np.array([each.read for each in told], np.int32)
    states = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    verified = VerifiedRows(
        states,
        (np.cumsum(read) - read).astype(np.int32),
        np.array([each.position for each in told], np.int32),
        count,
    )
    fields: dict[str, Any] = {
        "request_ids": [each.name for each in told],
        "rows": rows,
        "token_ids": table,
        "num_tokens": np.array([len(each.tokens) for each in told], np.int32),
        "num_prompt_tokens": np.full(size, 5, np.int32),
        "sampled": [each.tokens[len(each.tokens) - each.sampled :] for each in told],
        "budgets": np.array([each.budget for each in told], np.int32),
        "temperatures": np.zeros(size, np.float32),
        "pools": [None] * size,
        "finished": [],
        "vocab_size": VOCAB,
        "verified": verified,
        **changes,
    }
    return DraftContext(**fields)


def chains(drafts: list[DraftTree]) -> list[list[int]]:
    """The tokens of each."""
    return [draft.tokens.tolist() for draft in drafts]


def text(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(0, VOCAB, length)]


def reduced() -> DraftVocab:
    """40 tokens of VOCAB."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:40]
    return DraftVocab(ids, VOCAB)

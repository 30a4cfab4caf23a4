"""EAGLE and EAGLE-3 checkpoints, whatever their layout, as weights that fit the target.

Read are
    SafeAILab/yuhuili EAGLE (arXiv 2401.15077; EAGLE-2 and HASS have the same): `fc.weight`, `fc.bias`,
        `layers.N.*` without input_layernorm in layer 0, `embed_tokens.weight` and `lm_head.weight` or not;
    SafeAILab/yuhuili EAGLE-3 (arXiv 2503.01840) and SpecForge: `fc.weight`, `midlayer.*`, `norm.weight`,
        `lm_head.weight`, `d2t`, `t2d`;
    vLLM's (vllm/model_executor/models/llama_eagle.py, llama_eagle3.py), names with or without `model.`;
    vllm-project/speculators': `fusion_fc.*`, `transformer.*` (EAGLE) and `layers.0.*` (EAGLE-3);
    ours: the names of the first two, and for EAGLE a `token_map` (a tensor, or a .npy file that
        `specx.token_map` names) or `d2t` beside no lm_head, which chooses rows of the target's.
As .safetensors, .bin or .pt beside their config.json (eagle_keys.py). Nothing is unpickled but tensors.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from vllm_specx.draft.checkpoint_files import (
    CheckpointError,
    TargetShape,
    Tensors,
    acceptance_of,
    check_numbers,
    check_target,
    kind_of,
    own_block,
    read_checkpoint,
    vocab_of,
    without_identity,
)
from vllm_specx.draft.eagle_keys import EagleKeys, read_keys
from vllm_specx.draft.eagle_weights import DecoderShape, EagleWeights, LayerWeights
from vllm_specx.draft.named_tensors import NamedTensors, read_layer
from vllm_specx.draft.vocab import DraftVocab, VocabError

_RENAMED = (
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^(midlayer|transformer)\."), "layers.0."),
)
_LAYER = re.compile(r"^layers\.(\d+)\.")
_NOT_USED = re.compile(r"^(t2d|d2t|token_map|verifier_lm_head\.weight|verifier_norm\.weight)$")


@dataclass
class _Named(NamedTensors):
    """Tensors under the names of vLLM's llama_eagle3.py. target: what they must fit."""

    target: TargetShape


def load_eagle(
    path: str | Path, target: TargetShape, *, aux_layers: tuple[int, ...] | None = None
) -> EagleWeights:
    """Read a checkpoint folder or file and fit it to the target.

    aux_layers: the target's layers whose input is an auxiliary state, for EAGLE-3 checkpoints that do
    not say; without it those of vLLM, (2, L // 2, L - 3) for a target of L layers. They come back in
    ascending order, as the target supplies the states. Raises CheckpointError: one sentence that says
    what does not fit.
    """
    path = Path(path).expanduser()
    tensors, config = read_checkpoint(path)
    if kind_of(tensors, config) == "medusa":
        raise CheckpointError(
            f"{path} holds Medusa heads, not an EAGLE draft; write method 'specx:medusa'."
        )
    check_numbers(tensors, path)
    own = own_block(config, path)
    named = _named(tensors, target, path)
    if not any(_LAYER.match(name) for name in named.tensors):
        found = ", ".join(sorted(tensors)[:3]) or "nothing"
        raise CheckpointError(f"{path} has no EAGLE draft; it holds {found}.")
    keys = read_keys(config, path)
    try:
        weights = _fit(named, keys, aux_layers)
    except VocabError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return dataclasses.replace(weights, acceptance=acceptance_of(own, path))


def most_frequent(weights: EagleWeights, size: int, heads: str) -> EagleWeights:
    """The draft with only the `size` most frequent tokens of its vocabulary.

    heads: the checkpoint, for messages. Raises CheckpointError where the vocabulary is not in the order
    of frequency, as in EAGLE-3 checkpoints that have it by id.
    """
    vocab = weights.vocab
    if vocab is None or bool((vocab.token_ids.diff() > 0).all()):
        raise CheckpointError(
            f"vocab is {size}, but {heads} does not have its tokens by frequency; leave vocab out."
        )
    try:
        vocab = vocab.truncated(size)
    except VocabError as error:
        raise CheckpointError(str(error)) from None
    head = weights.lm_head
    return dataclasses.replace(
        weights, vocab=vocab, lm_head=None if head is None else head[:size].clone()
    )


def _named(tensors: Tensors, target: TargetShape, path: Path) -> _Named:
    renamed: Tensors = {}
    written: dict[str, str] = {}
    for original, tensor in tensors.items():
        name = original.removeprefix("model.")
        for pattern, replacement in _RENAMED:
            name = pattern.sub(replacement, name)
        renamed[name] = tensor
        written[name] = original
    needs = f"its config.json and a target with hidden size {target.hidden_size} and {target.vocab_size} tokens need"
    return _Named(renamed, written, path, target.dtype, needs, target)


def _fit(named: _Named, keys: EagleKeys, given: tuple[int, ...] | None) -> EagleWeights:
    target, path = named.target, named.path
    version = _version(named, keys)
    _check_sizes(named, keys, version)
    shape = keys.decoder(keys.intermediate_size or named.rows("layers.0.mlp.gate_proj.weight"))
    fc, bias, norms, input_norm, layers = _features(named, keys, version, given)
    vocab = vocab_of(named.tensors, keys.draft_vocab_size, target, path)
    weights = EagleWeights(
        version=version,
        shape=shape,
        fc=fc,
        fc_bias=bias,
        fc_norms=norms,
        input_norm=input_norm,
        layers=_layers(named, keys, shape, version),
        norm=named.get("norm.weight", shape.hidden_size) if version == 3 else None,
        lm_head=_lm_head(named, keys, version, vocab),
        embeddings=named.get_if_there("embed_tokens.weight", target.vocab_size, shape.hidden_size),
        vocab=without_identity(vocab),
        aux_layers=layers,
        norm_before_residual=keys.norm_before_residual and version == 3,
        norm_output=keys.norm_output and version == 3,
        logit_scale=keys.logit_scale,
    )
    named.refuse_the_rest("an EAGLE draft of Llama or Qwen2 layers", but=_NOT_USED)
    if shape.hidden_size != target.hidden_size and weights.embeddings is None:
        raise CheckpointError(
            f"{path} has no 'embed_tokens.weight', and those of the target have its hidden size "
            f"{target.hidden_size}, not the draft's {shape.hidden_size}; use a checkpoint with its own."
        )
    return weights


def _version(named: _Named, keys: EagleKeys) -> Literal[1, 3]:
    """What the tensors are; the configuration decides only where they do not."""
    is_3 = "layers.0.hidden_norm.weight" in named or keys.version == 3
    if is_3 and keys.version == 1:
        raise CheckpointError(
            f"{named.path} is an EAGLE-3 draft by its tensors and an EAGLE draft by its config.json; "
            "correct its speculators_model_type."
        )
    return 3 if is_3 else 1


def _check_sizes(named: _Named, keys: EagleKeys, version: Literal[1, 3]) -> None:
    target, path = named.target, named.path
    if keys.target_hidden_size is not None and version == 3:
        check_target("hidden_size", keys.target_hidden_size, target.hidden_size, path)
        if not keys.use_aux_hidden_state:
            check_target("hidden_size", keys.hidden_size, target.hidden_size, path)
    else:
        check_target("hidden_size", keys.hidden_size, target.hidden_size, path)
    check_target("vocab_size", keys.vocab_size, target.vocab_size, path)
    there = 1 + max(int(m.group(1)) for name in named.tensors if (m := _LAYER.match(name)))
    if keys.num_hidden_layers is not None and keys.num_hidden_layers != there:
        raise CheckpointError(
            f"{path} has {there} draft layers, but its config.json says {keys.num_hidden_layers}; it may "
            "be incomplete, copy it again."
        )


def _features(
    named: _Named, keys: EagleKeys, version: Literal[1, 3], given: tuple[int, ...] | None
) -> tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    tuple[torch.Tensor, ...],
    torch.Tensor | None,
    tuple[int, ...],
]:
    """fc, its bias, the norms before it, and where its inputs come from."""
    hidden, of_target = keys.hidden_size, named.target.hidden_size
    if version == 1 or not keys.use_aux_hidden_state:
        if given:
            raise CheckpointError(
                f"{named.path} takes the target's last hidden state; leave aux_layers out."
            )
        if version == 3:
            named.used |= {"fc.weight", "fc.bias", "input_norm.weight"}
            return None, None, (), None, ()
        fc = named.get("fc.weight", hidden, 2 * hidden)
        return fc, named.get_if_there("fc.bias", hidden), (), None, ()
    width = named.raw("fc.weight").numel() // max(1, named.rows("fc.weight"))
    states = keys.num_aux_hidden_states or max(1, width // of_target)
    fc = named.get("fc.weight", hidden, states * of_target)
    named.used.add("input_norm.weight")
    return (
        fc,
        named.get_if_there("fc.bias", hidden),
        tuple(named.get(f"fc_norm.{i}.weight", of_target) for i in range(states))
        if keys.fc_norm
        else (),
        named.get("input_norm.weight", states * of_target) if keys.norm_before_fc else None,
        _aux_layers(keys, states, given, named.target, named.path),
    )


def _aux_layers(
    keys: EagleKeys, states: int, given: tuple[int, ...] | None, target: TargetShape, path: Path
) -> tuple[int, ...]:
    said = None if keys.aux_layers is None else tuple(sorted(keys.aux_layers))
    chosen = None if given is None else tuple(sorted(given))
    if said and chosen and said != chosen:
        raise CheckpointError(
            f"aux_layers is {list(chosen)}, but {path} was trained with {list(said)}; leave it out."
        )
    layers = said or chosen
    if layers is None:
        last = target.num_layers
        if states != 3 or last is None:
            raise CheckpointError(
                f"{path} does not say which layers of the target its {states} auxiliary states come "
                "from; set aux_layers."
            )
        layers = tuple(sorted((2, last // 2, last - 3)))
    if len(layers) != states or len(set(layers)) != states or layers[0] < 0:
        raise CheckpointError(
            f"{path} joins {states} auxiliary states, which cannot come from the layers {list(layers)}; "
            "set aux_layers to as many layers as it was trained with."
        )
    if target.num_layers is not None and layers[-1] > target.num_layers:
        raise CheckpointError(
            f"{path} wants the state before layer {layers[-1]}, but this target has "
            f"{target.num_layers} layers; use a draft that was trained for it."
        )
    return layers


def _layers(
    named: _Named, keys: EagleKeys, shape: DecoderShape, version: Literal[1, 3]
) -> tuple[LayerWeights, ...]:
    count = 1 + max(int(m.group(1)) for name in named.tensors if (m := _LAYER.match(name)))
    if version == 3:
        # vLLM's later layers have this norm as well and do not use it.
        named.used |= {f"layers.{index}.hidden_norm.weight" for index in range(1, count)}
    return tuple(
        read_layer(
            named,
            f"layers.{index}.",
            shape,
            doubled=version == 3 and index == 0,
            input_norm="if there" if version == 1 and index == 0 else "always",
        )
        for index in range(count)
    )


def _lm_head(
    named: _Named, keys: EagleKeys, version: Literal[1, 3], vocab: DraftVocab | None
) -> torch.Tensor | None:
    """[N, hidden], or None for the target's rows."""
    path, whole, hidden = named.path, named.target.vocab_size, keys.hidden_size
    said = keys.draft_vocab_size
    # vLLM's EAGLE does not look at draft_vocab_size, and configurations made from EAGLE-3's have it.
    if vocab is None and said is not None and said < whole and version == 3:
        raise CheckpointError(
            f"{path} has a draft vocabulary of {said} tokens, but no d2t that says which."
        )
    if "lm_head.weight" not in named:
        if hidden != named.target.hidden_size:
            raise CheckpointError(
                f"{path} has no 'lm_head.weight', and its hidden size {hidden} is not the target's "
                f"{named.target.hidden_size}; use a checkpoint with its own."
            )
        return None
    rows = whole if vocab is None else len(vocab)
    if vocab is not None and named.rows("lm_head.weight") == whole > rows:
        return named.get("lm_head.weight", whole, hidden)[vocab.token_ids]
    return named.get("lm_head.weight", rows, hidden)

"""The target's hidden states for the training text, computed once and memory-mapped.

    python -m vllm_specx.train.hidden SETTINGS.json TEXT_FOLDER FOLDER [PART/PARTS]

For each text shard (generate.py) FOLDER gets
    hidden-00000.safetensors  last uint16 [T, hidden]: bfloat16 bits of the state after the final norm,
        which is what vLLM's runner hands to proposers and what lm_head multiplies;
    aux-00000.safetensors     layer.N uint16 [T, hidden], one array an auxiliary layer: the residual
        stream before layer N, as vLLM's set_aux_hidden_state_layers counts them (EAGLE-3).
A plain forward without a KV cache; a killed run goes on after the last whole shard. Shards that the
engine has recorded while it generated (generate.py) are taken as they are.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field

from vllm_specx.train import shards, tether
from vllm_specx.train.compute import fastest_dtype
from vllm_specx.train.errors import TrainError
from vllm_specx.train.generate import KIND as TEXT
from vllm_specx.train.generate import target_identity

LAST, AUX = "hidden", "aux"


class HiddenSettings(BaseModel):
    """What the cached states are computed from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    aux_layers: tuple[int, ...] = ()
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the forward; auto is what this machine is fastest in. The cache is bfloat16."""
    batch_tokens: Annotated[int, Field(ge=64)] = 4096
    device: str = "cpu"

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for cached states to belong together."""
        return {
            "target": target_identity(self.target),
            "aux_layers": list(self.aux_layers),
        }


class HiddenStates:
    """The target's decoder stack, without lm_head."""

    def __init__(self, settings: HiddenSettings) -> None:
        from transformers import AutoModelForCausalLM

        self._settings = settings
        chosen = settings.dtype
        dtype = fastest_dtype(settings.device) if chosen == "auto" else getattr(torch, chosen)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(settings.target, dtype=dtype)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise TrainError(f"the target {settings.target} cannot be loaded: {first}") from None
        self._decoder: Any = model.get_decoder().eval().to(settings.device)
        self._taps: dict[int, torch.Tensor] = {}
        layers = getattr(self._decoder, "layers", ())
        for number in settings.aux_layers:
            if not 0 <= number < len(layers):
                raise TrainError(
                    f"auxiliary layer {number} does not exist; the target has {len(layers)} layers."
                )
            layers[number].register_forward_pre_hook(self._tap(number), with_kwargs=True)

    def _tap(self, number: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self._taps[number] = args[0] if args else kwargs["hidden_states"]

        return hook

    @property
    def size(self) -> int:
        """The width of a hidden state."""
        return int(self._decoder.config.hidden_size)

    @torch.inference_mode()
    def __call__(
        self, tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint16], dict[int, npt.NDArray[np.uint16]]]:
        """tokens int32 [T], offsets int64 [N+1] -> last [T, hidden] and each auxiliary layer's."""
        last = np.empty((len(tokens), self.size), np.uint16)
        aux = {number: np.empty_like(last) for number in self._settings.aux_layers}
        for batch in _batches(np.diff(offsets), self._settings.batch_tokens):
            spans = [(int(offsets[i]), int(offsets[i + 1])) for i in batch]
            longest = max(end - start for start, end in spans)
            padded = np.zeros((len(spans), longest), np.int64)
            for row, (start, end) in enumerate(spans):
                padded[row, : end - start] = tokens[start:end]
            # Padding stands behind the text, where causal attention does not see it.
            ids = torch.from_numpy(padded).to(self._settings.device)
            states = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
            for target, source in [(last, states), *((aux[n], self._taps[n]) for n in aux)]:
                bits = source.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
                for row, (start, end) in enumerate(spans):
                    target[start:end] = bits[row, : end - start]
        return last, aux


def _batches(lengths: npt.NDArray[np.int64], most: int) -> list[list[int]]:
    """Conversations of similar length together, at most `most` padded tokens (or one conversation)."""
    batches: list[list[int]] = [[]]
    for i in np.argsort(lengths)[::-1]:
        longest = lengths[batches[-1][0]] if batches[-1] else 0
        if batches[-1] and (len(batches[-1]) + 1) * longest > most:
            batches.append([])
        batches[-1].append(int(i))
    return [batch for batch in batches if batch]


def of_text(tokens: npt.NDArray[np.int32]) -> dict[str, str]:
    """What the metadata of a shard says of the text shard that it was made from."""
    return {"text": f"{zlib.crc32(tokens.tobytes()):08x}"}


def require_text(shard: shards.Shard, tokens: npt.NDArray[np.int32]) -> None:
    """Raise BrokenShard if a shard has not one row a token of this text (or notes another text)."""
    wanted = of_text(tokens)["text"]
    sizes = {len(array) for array in shard.arrays.values()}
    if sizes != {len(tokens)} or shard.meta.get("text", wanted) != wanted:
        raise shards.BrokenShard(f"{shard.path}: it was made from other text")


def whole(folder: Path, index: int, kinds: Sequence[str], tokens: npt.NDArray[np.int32]) -> bool:
    """Whether shard `index` of each kind is there, complete and of this text; others are deleted."""
    for kind in kinds:
        path = shards.shard_path(folder, kind, index)
        try:
            require_text(shards.read_shard(path), tokens)
        except shards.BrokenShard as error:
            if path.exists():
                print(f"vllm-specx: {error}; it is made anew.", file=sys.stderr)
                path.unlink(missing_ok=True)
            return False
    return True


def write_states(
    folder: Path,
    index: int,
    last: npt.NDArray[np.uint16],
    aux: dict[int, npt.NDArray[np.uint16]],
    tokens: npt.NDArray[np.int32],
) -> None:
    """One shard's states, [T, hidden] each; the last state comes last, when all is there."""
    made_from = of_text(tokens)
    if aux:
        named = {f"layer.{number}": array for number, array in aux.items()}
        shards.write_shard(shards.shard_path(folder, AUX, index), named, made_from)
    shards.write_shard(shards.shard_path(folder, LAST, index), {"last": last}, made_from)


def extract(
    settings: HiddenSettings,
    text: Path,
    folder: Path,
    report: Callable[[int, int], None],
    part: tuple[int, int] = (0, 1),
) -> None:
    """Make `folder` hold the states of every shard in `text`. report: told (tokens, of tokens)."""
    folder.mkdir(parents=True, exist_ok=True)
    if part[1] == 1:
        shards.remove_leftovers(folder)
    shards.check_fingerprint(folder, LAST, settings.fingerprint())
    kinds = [LAST, AUX] if settings.aux_layers else [LAST]
    mine = [i for i in shards.indices(text, TEXT) if i % part[1] == part[0]]
    sizes = {}
    missing = []
    done = 0
    for index in mine:
        tokens = shards.read_shard(shards.shard_path(text, TEXT, index)).arrays["tokens"]
        sizes[index] = len(tokens)
        if whole(folder, index, kinds, tokens):
            done += sizes[index]
        else:
            missing.append(index)
    report(done, sum(sizes.values()))
    states = HiddenStates(settings) if missing else None
    for index in missing:
        assert states is not None
        arrays = shards.read_shard(shards.shard_path(text, TEXT, index)).arrays
        last, aux = states(arrays["tokens"], arrays["offsets"])
        write_states(folder, index, last, aux, arrays["tokens"])
        done += sizes[index]
        report(done, sum(sizes.values()))


def main(arguments: list[str]) -> int:
    """Extract in a process of its own."""
    from vllm_specx.train.progress import Progress

    tether.hold()
    settings = HiddenSettings.model_validate(json.loads(Path(arguments[0]).read_text()))
    part, parts = (arguments[3] if len(arguments) > 3 else "0/1").split("/")
    with Progress("hidden states", "tok") as progress:
        try:
            extract(
                settings,
                Path(arguments[1]),
                Path(arguments[2]),
                progress.update,
                (int(part), int(parts)),
            )
        except TrainError as error:
            print(f"vllm-specx: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

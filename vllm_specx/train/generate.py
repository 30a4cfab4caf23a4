"""Self-distillation data: the target answers prompts, and every answer is kept as token ids.

    python -m vllm_specx.train.generate SETTINGS.json FOLDER [PART/PARTS [STATES [LAYER,LAYER]]]

writes FOLDER/text-00000.safetensors ... with
    tokens int32 [T]: conversations end to end;
    offsets int64 [N+1]: where each begins;
    source uint8 [T]: 0 given, 1 generated greedily, 2 sampled at temperature > 0;
    task uint8 [N]: index into the metadata's `tasks`.
With STATES, that folder gets the hidden states that the engine has come through, and with LAYERs the
auxiliary ones too, as hidden.py would compute them, and needs no forward of its own. A conversation's
last token, or a follow-up that got no answer, was not read: its states are zeros.
A killed run loses at most the shard it was making; the same command goes on. Several processes may
fill one folder, each its own part (0/2 and 1/2 take every other shard).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from vllm_specx.train import shards, tether
from vllm_specx.train.chat import Chat
from vllm_specx.train.compute import generation_dtype
from vllm_specx.train.errors import TrainError
from vllm_specx.train.prompts import Prompt, built_in, from_files

KIND = "text"
GIVEN, GREEDY, SAMPLED = 0, 1, 2


class GenerateSettings(BaseModel):
    """What the training text is made from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    """The target's checkpoint folder or hub name."""
    tokens: Annotated[int, Field(ge=1)] = 3_000_000
    """Tokens to be generated; a larger number later goes on."""
    prompts: tuple[Path, ...] = ()
    """JSONL files of prompts; none: the built-in templates and the target's own."""
    seed: int = 0
    own_share: Annotated[float, Field(ge=0, le=1)] = 0.35
    """Share of prompts that the target writes itself."""
    follow_up_share: Annotated[float, Field(ge=0, le=1)] = 0.15
    sampled_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of answers at a temperature between 0.7 and 1; the others are greedy."""
    max_answer: Annotated[int, Field(ge=1)] = 256
    max_length: Annotated[int, Field(ge=16)] = 1024
    """Tokens of a whole conversation."""
    conversations: Annotated[int, Field(ge=1)] = 512
    """Conversations a shard."""
    batch: Annotated[int, Field(ge=1)] = 64

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for shards to belong together."""
        kept = self.model_dump(mode="json", exclude={"tokens", "batch", "target", "prompts"})
        files = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in self.prompts]
        return {"target": target_identity(self.target), "prompts": files, **kept}


def target_identity(target: str) -> str:
    """A name that changes with the target's weights: sizes and configuration of a folder, or the hub name."""
    folder = Path(target)
    if not folder.is_dir():
        return target
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return f"{folder.name} {digest.hexdigest()[:16]}"


class Target(Protocol):
    """What generation needs of an engine (engine/offline.py: OfflineTarget)."""

    def tokenizer(self) -> Any: ...

    def generate(self, prompts: Any, sampling: Any, *, record: bool = True) -> list[Any]: ...


@dataclass
class _Conversation:
    prompt: Prompt
    messages: list[dict[str, str]]
    ids: list[int]
    source: list[int]
    temperature: float
    open: bool = True
    text: str = field(default="")
    states: npt.NDArray[np.uint16] | None = None
    """[tokens, kinds, hidden], from the first token on."""


class Made(NamedTuple):
    """A shard that is not written yet. states: uint16 [kinds, T, hidden], if all were recorded."""

    arrays: shards.Arrays
    meta: dict[str, str]
    states: npt.NDArray[np.uint16] | None


class Generator:
    """Makes shards with a running target."""

    def __init__(self, settings: GenerateSettings, target: Target) -> None:
        from vllm_specx.engine.offline import Sampling

        self._sampling = Sampling
        self._settings = settings
        self._target = target
        self._chat = Chat(target.tokenizer())
        self._given = from_files(settings.prompts) if settings.prompts else None

    def shard(self, index: int) -> Made:
        """Shard `index`; its prompts depend on the seed and the index only."""
        settings = self._settings
        chance = random.Random(f"{settings.seed}/{index}/temperature")
        prompts = self._write_own(
            list(itertools.islice(self._prompts(index), settings.conversations))
        )
        conversations = []
        for prompt in prompts:
            sampled = chance.random() < settings.sampled_share
            temperature = round(chance.uniform(0.7, 1.0), 2) if sampled else 0.0
            messages = prompt.chat()
            ids = self._chat.ids(self._chat.text(messages))
            conversations.append(
                _Conversation(prompt, messages, ids, [GIVEN] * len(ids), temperature)
            )
        self._answer(conversations)
        self._follow_up(conversations)
        self._answer(conversations)
        answered = [c for c in conversations if any(c.source)]
        return Made(*_arrays(answered), _states(answered))

    def _prompts(self, index: int) -> Iterator[Prompt]:
        settings = self._settings
        if self._given is None:
            yield from built_in(
                f"{settings.seed}/{index}",
                own_share=settings.own_share,
                follow_up_share=settings.follow_up_share,
            )
        first = index * settings.conversations
        for i in itertools.count(first):
            assert self._given is not None
            yield self._given[i % len(self._given)]

    def _write_own(self, prompts: list[Prompt]) -> list[Prompt]:
        own = [prompt for prompt in prompts if prompt.own]
        begun = [self._chat.ids(self._chat.before_user + prompt.start) for prompt in own]
        sampling = [self._sampling(1.0, 192) for _ in own]
        written = []
        for prompt, completion in zip(
            own, self._target.generate(begun, sampling, record=False), strict=True
        ):
            text = (prompt.start + completion.text).strip()
            if completion.finished and len(text) > 3:
                written.append(Prompt("own", (("user", text),), prompt.follow_up))
        return [*(prompt for prompt in prompts if not prompt.own), *written]

    def _answer(self, conversations: list[_Conversation]) -> None:
        settings = self._settings
        asked = [c for c in conversations if c.open]
        asked = [c for c in asked if len(c.ids) + 16 < settings.max_length]
        sampling = [
            self._sampling(
                c.temperature,
                min(settings.max_answer, settings.max_length - len(c.ids) - 1),
            )
            for c in asked
        ]
        for c in conversations:
            c.open = False
        completions = self._target.generate([c.ids for c in asked], sampling)
        for c, completion in zip(asked, completions, strict=True):
            c.states = completion.states
            c.ids += completion.token_ids
            c.source += [SAMPLED if c.temperature else GREEDY] * len(completion.token_ids)
            c.text = completion.text
            c.open = completion.finished

    def _follow_up(self, conversations: list[_Conversation]) -> None:
        for c in conversations:
            turn = None
            if c.open and c.prompt.follow_up:
                turn = self._chat.next_turn(c.messages, c.text, c.prompt.follow_up)
            if not turn:
                c.open = False
                continue
            end = turn[0] == c.ids[-1]
            c.ids += turn[1:] if end else turn
            c.source += [GIVEN] * (len(turn) - end)


def _arrays(conversations: list[_Conversation]) -> tuple[shards.Arrays, dict[str, str]]:
    tasks = sorted({c.prompt.task for c in conversations})
    lengths = [len(c.ids) for c in conversations]
    source = np.array([s for c in conversations for s in c.source], np.uint8)
    arrays: shards.Arrays = {
        "tokens": np.array([i for c in conversations for i in c.ids], np.int32),
        "offsets": np.cumsum([0, *lengths]).astype(np.int64),
        "source": source,
        "task": np.array([tasks.index(c.prompt.task) for c in conversations], np.uint8),
    }
    return arrays, {"tasks": json.dumps(tasks), "generated": str(int((source > 0).sum()))}


def _states(conversations: list[_Conversation]) -> npt.NDArray[np.uint16] | None:
    """Moves the states out of the conversations: of a large target, a shard's are many gigabytes,
    which must not be there twice."""
    shapes = {c.states.shape[1:] for c in conversations if c.states is not None}
    if len(shapes) != 1 or any(c.states is None for c in conversations):
        return None
    ((kinds, size),) = shapes
    states = np.zeros((kinds, sum(len(c.ids) for c in conversations), size), np.uint16)
    begin = 0
    for c in conversations:
        assert c.states is not None
        states[:, begin : begin + len(c.states)] = c.states.swapaxes(0, 1)
        begin += len(c.ids)
        c.states = None
    return states


def existing(folder: Path, *, check: bool = True) -> dict[int, int]:
    """Whole shards and the tokens generated in each; broken ones are deleted."""
    found = {}
    for index in shards.indices(folder, KIND):
        path = shards.shard_path(folder, KIND, index)
        try:
            found[index] = int(shards.read_shard(path, check=check).meta["generated"])
        except shards.BrokenShard as error:
            print(f"vllm-specx: {error}; it is made anew.", file=sys.stderr)
            path.unlink(missing_ok=True)
    return found


def generate(
    settings: GenerateSettings,
    folder: Path,
    make_target: Callable[[], Target],
    report: Callable[[int, int], None],
    part: tuple[int, int] = (0, 1),
    hidden: Path | None = None,
    aux_layers: tuple[int, ...] = (),
) -> int:
    """Fill `folder` until settings.tokens are generated; the number that are there.

    make_target: starts the engine, only if there is something to do.
    report: told (tokens so far, tokens wanted) after each shard.
    part: (i, n) makes only the shards whose number is i modulo n.
    hidden: where the states go that the target has recorded, of aux_layers too.
    """
    from vllm_specx.train.hidden import LAST, HiddenSettings

    folder.mkdir(parents=True, exist_ok=True)
    if part[1] == 1:
        shards.remove_leftovers(folder)
    shards.check_fingerprint(folder, KIND, settings.fingerprint())
    if hidden is not None:
        hidden.mkdir(parents=True, exist_ok=True)
        if part[1] == 1:
            shards.remove_leftovers(hidden)
        made_from = HiddenSettings(target=settings.target, aux_layers=aux_layers).fingerprint()
        shards.check_fingerprint(hidden, LAST, made_from)
    have = existing(folder)
    total = sum(have.values())
    report(total, settings.tokens)
    if total >= settings.tokens:
        return total
    generator = Generator(settings, make_target())
    for index in itertools.count(part[0], part[1]):
        if index in have:
            continue
        _write(generator.shard(index), index, settings.target, folder, hidden, aux_layers)
        total = sum(existing(folder, check=False).values())
        report(total, settings.tokens)
        if total >= settings.tokens:
            break
    return total


def _write(
    made: Made,
    index: int,
    target: str,
    folder: Path,
    hidden: Path | None,
    aux_layers: tuple[int, ...],
) -> None:
    from vllm_specx.train.hidden import write_states

    if not int(made.meta["generated"]):
        raise TrainError(f"the target {target} answers nothing to the prompts.")
    if hidden is not None and made.states is not None:
        last, *aux = made.states
        named = dict(zip(aux_layers, aux, strict=True))
        write_states(hidden, index, last, named, made.arrays["tokens"])
    elif hidden is not None:
        print(
            "vllm-specx: the engine did not record all states; they take a forward of their own.",
            file=sys.stderr,
        )
    # Last, so that a shard of text that is there has its states.
    shards.write_shard(shards.shard_path(folder, KIND, index), made.arrays, made.meta)


def engine_target(
    settings: GenerateSettings, record: Path | None, aux_layers: tuple[int, ...] = ()
) -> Callable[[], Target]:
    """Starts the target with vLLM; see engine.offline.OfflineTarget."""

    def make() -> Target:
        from vllm_specx.engine.offline import OfflineTarget

        return OfflineTarget(
            settings.target,
            batch=settings.batch,
            max_model_len=settings.max_length,
            record=record,
            aux_layers=aux_layers,
            dtype=generation_dtype(settings.target),
        )

    return make


def main(arguments: list[str]) -> int:
    """Generate in a process of its own, so that the engine's memory is free afterwards."""
    from vllm_specx.train.progress import Progress

    tether.hold()
    settings = GenerateSettings.model_validate_json(Path(arguments[0]).read_text())
    part, parts = (arguments[2] if len(arguments) > 2 else "0/1").split("/")
    hidden = Path(arguments[3]) if len(arguments) > 3 else None
    layers = arguments[4].split(",") if len(arguments) > 4 and arguments[4] else []
    aux_layers = tuple(int(layer) for layer in layers)
    began = time.monotonic()
    with Progress("text", "tok") as progress:
        try:
            total = generate(
                settings,
                Path(arguments[1]),
                engine_target(settings, hidden, aux_layers),
                progress.update,
                (int(part), int(parts)),
                hidden,
                aux_layers,
            )
        except TrainError as error:
            print(f"vllm-specx: {error}", file=sys.stderr)
            return 2
    print(f"text: {total} tokens, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

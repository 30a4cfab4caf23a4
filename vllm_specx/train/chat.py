"""Conversations as token ids, by the target's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_specx.train.errors import TrainError
from vllm_specx.train.prompts import Message

_MARK = "\x02specx\x03"


class Chat:
    """Renders conversations. tokenizer: a transformers tokenizer with a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TrainError(
                "the target's tokenizer has no chat template; train on an instruction-tuned target."
            )
        self._tokenizer = tokenizer
        rendered = self.text([{"role": "user", "content": _MARK}])
        if _MARK not in rendered:
            raise TrainError("the target's chat template does not show the user's text.")
        self.before_user: str = rendered.split(_MARK)[0]
        """What stands before a user's first words: from here the target writes its own prompts."""

    def text(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the assistant begins to write."""
        rendered: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return rendered

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        encoded: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return encoded

    def next_turn(self, messages: Sequence[Message], answer: str, user: str) -> list[int] | None:
        """Token ids between the end of an answer and the next answer; None if the template
        rewrites earlier turns, so that nothing can be appended."""
        said = self.text(messages) + answer
        both: list[Message] = [
            *messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": user},
        ]
        whole = self.text(both)
        return self.ids(whole[len(said) :]) if whole.startswith(said) else None

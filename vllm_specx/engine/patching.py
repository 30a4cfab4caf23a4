"""Replace one function of vLLM by ours, once, in a way that can be seen and undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "__specx_original__"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, *args, **kwargs)`; a second call changes nothing."""
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, MARK, original)
    setattr(owner, name, wrapper)


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's own function behind one of our wrappers, or the function itself."""
    original: Callable[..., Any] = getattr(function, MARK, function)
    return original

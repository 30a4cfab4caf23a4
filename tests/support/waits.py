"""Counts what waits for the device: PyTorch's meta device, which has shapes and no values, stands for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SIZES_DEPEND_ON_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique2",
    "aten::repeat_interleave",
}
READ = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}


class Waits(TorchDispatchMode):
    """found: names of the operations of which the host has to wait for the result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        masked = name.startswith("aten::index") and _masked(args)
        copied = name == "aten::copy_" and args[0].device != args[1].device
        to = (kwargs or {}).get("device") if name == "aten::_to_copy" else None
        moved = to is not None and to.type != args[0].device.type
        if name in SIZES_DEPEND_ON_VALUES | READ or masked or copied or moved:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _masked(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)


@contextmanager
def counted() -> Iterator[list[str]]:
    """What waits within it. Reading a value ends it there, as there is none."""
    waits = Waits()
    with waits:
        try:
            yield waits.found
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if not waits.found and "meta" not in str(error):
                raise
            waits.found.append(type(error).__name__)

"""The record of a finished set-up."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "vllm_specx/setup/steps.py")
FILE = ".vllm_specx.json"


@dataclass(frozen=True)
class Stamp:
    """What an environment was set up for: extras, the checkout's place, and its requirements."""

    extras: frozenset[str]
    checkout: str
    digest: str

    @classmethod
    def of_checkout(cls, extras: set[str]) -> Stamp:
        """The stamp that this checkout wants now."""
        digest = hashlib.sha256()
        for source in SOURCES:
            digest.update((CHECKOUT / source).read_bytes())
        return cls(frozenset(extras), str(CHECKOUT), digest.hexdigest())

    @classmethod
    def read(cls, venv: Path) -> Stamp:
        """The stamp of an environment; an empty one if there is none or its Python is gone."""
        try:
            if not os.access(venv / "bin" / "python", os.X_OK):
                raise OSError
            data = json.loads((venv / FILE).read_text())
            return cls(frozenset(data["extras"]), data["checkout"], data["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return cls(frozenset(), "", "")

    @staticmethod
    def remove(venv: Path) -> None:
        """From here on the environment counts as not set up."""
        (venv / FILE).unlink(missing_ok=True)

    def covers(self, wanted: Stamp) -> bool:
        """Whether an environment with this stamp needs no set-up for `wanted`."""
        same = (self.checkout, self.digest) == (wanted.checkout, wanted.digest)
        return same and self.extras >= wanted.extras

    def with_extras_of(self, other: Stamp) -> Stamp:
        """This stamp, keeping what another set-up had installed besides."""
        devices = {"cpu", "gpu"}
        return replace(self, extras=self.extras | (other.extras - devices))

    def write(self, venv: Path) -> None:
        """Record the finished set-up, at once or not at all."""
        temporary = venv / f"{FILE}.{os.getpid()}"
        data = {"extras": sorted(self.extras), "checkout": self.checkout, "digest": self.digest}
        temporary.write_text(json.dumps(data) + "\n")
        temporary.rename(venv / FILE)

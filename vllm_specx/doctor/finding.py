"""What the doctor says: one thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note", "unchecked", "ok"]
"""error: it cannot work. warning: it works worse than it could. note: to know. unchecked: what was
needed to look at it is not here. ok: looked at, and right."""
ORDER: tuple[Severity, ...] = ("error", "warning", "unchecked", "note", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """topic: what was looked at, in a word or two. what: without a full stop. fix: what to do, without
    one; empty if there is nothing to do."""

    severity: Severity
    topic: str
    what: str
    fix: str = ""

    @property
    def sentence(self) -> str:
        """What and how to mend it, as one sentence."""
        return f"{self.what}; {self.fix}." if self.fix else f"{self.what}."

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those for which it cannot work."""
    return [finding for finding in findings if finding.severity == "error"]

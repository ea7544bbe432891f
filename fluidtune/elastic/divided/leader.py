"""The leader's side of divided calls: a stub until the room is written."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class DivisionFacts:
    """What the leader knows of its modules and its followers; see `fluidtune.group_facts.GroupFacts`."""

    calls_modules: bool = False
    width: int = 1
    checked: tuple[tuple[str, str, str], ...] = ()
    ungrowable: str | None = None
    first_divided: float | None = None


class Division:
    """Divides the calls of modules of one trial. ``host``: where it listens; None: on this node only."""

    def __init__(self, trial: str, secret: bytes, host: str | None, device: str, backend: str) -> None:
        #: Where followers find it.
        self.address: Hashable = None

    def facts(self) -> DivisionFacts:
        """What is known now. What was checked is told once."""
        return DivisionFacts()

    def begin_iteration(self) -> None:
        """An iteration begins."""

    def close(self) -> None:
        """Let go of the followers; idempotent."""

"""Reservations that could not be made: which app is not leased which GPU for how long.

Somebody outside has the GPU, or the CPUs beside it. The pause before the next try doubles from one failure to the
next. A lease of such a pair that is tried again is not told to its app, and does not count as held, until it is
reserved.
"""

from __future__ import annotations

from collections.abc import Iterator

#: How often a pause is doubled at most.
DOUBLED = 4


class Setbacks:
    """Of pairs of a GPU and an app; seconds on the arbiter's clock."""

    def __init__(self) -> None:
        #: (GPU, app) -> failures one after the other, and when the next try may be made.
        self._known: dict[tuple[str, str], tuple[int, float]] = {}

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return pair in self._known

    def add(self, gpu: str, app: str, now: float, pause: float) -> None:
        """A reservation failed; ``pause``: after the first one."""
        before, _ = self._known.get((gpu, app), (0, 0.0))
        self._known[gpu, app] = (before + 1, now + pause * 2 ** min(before, DOUBLED))

    def over(self, gpu: str, app: str) -> bool:
        """A reservation was made; returns whether one had failed before."""
        return self._known.pop((gpu, app), None) is not None

    def forget(self, *, gpu: str | None = None, app: str | None = None) -> None:
        """The GPU or the app is gone."""
        self._known = {pair: known for pair, known in self._known.items() if pair[0] != gpu and pair[1] != app}

    def barred(self, gpu: str, now: float) -> frozenset[str]:
        """Apps that are not leased the GPU now."""
        return frozenset(app for (each, app), (_, until) in self._known.items() if each == gpu and until > now)

    def ends(self, now: float) -> Iterator[tuple[str, float]]:
        """GPUs, and when an app may have them again."""
        return ((gpu, until) for (gpu, _), (_, until) in self._known.items() if until > now)

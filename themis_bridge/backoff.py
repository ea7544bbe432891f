"""Backoff after reservations that could not be made: which app is not granted which GPU, and until when.

Ray cannot reserve a GPU for an app when something outside Themis uses the GPU, or the CPUs that the app needs beside
it. The GPU is then granted neither to that app nor to one that asks for as much, for a pause that doubles with each
failure in a row and ends early when something outside gives resources back. A grant that is tried again is not told to
its app, and does not count as held, until Ray has made the reservation. (Ray keeps each group that it could not make in
its table for ever, so that attempts have to be few.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: A pause is doubled at most this often: with the default settings the longest one is 320 s, half a lease.
MAX_DOUBLINGS = 6


class Backoff:
    """The failed pairs of a GPU and an app. All times are seconds on the arbiter's clock."""

    def __init__(self) -> None:
        #: GPU -> app -> failures in a row, and when the next attempt may be made.
        self._failed: dict[str, dict[str, tuple[int, float]]] = {}

    def __contains__(self, pair: tuple[str, str]) -> bool:
        """Whether the last reservation of this (GPU, app) failed, its pause over or not."""
        gpu, app = pair
        return app in self._failed.get(gpu, ())

    def record_failure(self, gpu: str, apps: Iterable[str], now: float, pause: float) -> None:
        """A reservation failed that would have failed for each of these apps. ``pause``: seconds, after a first one."""
        failed, apps = self._failed.setdefault(gpu, {}), set(apps)
        before = max((failed[app][0] for app in apps & failed.keys()), default=0)
        known = (before + 1, now + pause * 2 ** min(before, MAX_DOUBLINGS))
        failed.update(dict.fromkeys(apps, known))

    def record_success(self, gpu: str, app: str) -> bool:
        """A reservation was made. Returns whether the one before it had failed."""
        self.end_pauses(gpu)
        return self._failed.get(gpu, {}).pop(app, None) is not None

    def end_pauses(self, gpu: str | None = None) -> None:
        """End the pauses of a GPU, or of all: something has changed. A failure after that counts as one more."""
        for each in self._failed.values() if gpu is None else [self._failed.get(gpu, {})]:
            each.update({app: (failures, 0.0) for app, (failures, _) in each.items()})

    def forget(self, *, gpu: str | None = None, app: str | None = None) -> None:
        """Drop every pair with a GPU or an app that is gone."""
        self._failed.pop(gpu or "", None)
        for each in self._failed.values():
            each.pop(app or "", None)

    def barred_apps(self, gpu: str, now: float) -> frozenset[str]:
        """The apps that must not be granted the GPU now."""
        return frozenset(app for app, (_, until) in self._failed.get(gpu, {}).items() if until > now)

    def retry_times(self, now: float) -> Iterator[tuple[str, float]]:
        """(GPU, time) of every pause that is not over."""
        return ((gpu, until) for gpu, each in self._failed.items() for _, until in each.values() if until > now)

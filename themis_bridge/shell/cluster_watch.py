"""What the arbiter's process looks at once a second: silent drivers, and resources that others hold.

When a driver joins it makes a placement group, which Ray removes when the driver is dead: its sign of life, see
`reservations.sign_of_life`. So the arbiter can tell a driver that stands still from one that is dead. Calls of Ray and
the clock, in seconds, are handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from themis_bridge import messages as m
from themis_bridge.arbiter_state import ArbiterState

logger = logging.getLogger(__name__)

#: After this many seconds of silence, which are ten missed exchanges, the arbiter looks whether a driver is dead.
SILENT_S = 2.0
#: Seconds without a call of Ray that is due, and without a change of what is leased, before what others hold is
#: computed: Ray's own count of what is taken is older than the calls, by less than a second.
QUIET_S = 3.0


class SilentDrivers:
    """Which of the silent apps have lost their drivers. ``is_gone``: whether Ray has removed a sign of life."""

    def __init__(self, is_gone: Callable[[str], bool], clock: Callable[[], float]):
        self._is_gone, self._clock = is_gone, clock
        #: Grows with each look, so that every app has its turn.
        self._turn = 0

    def silent(self, state: ArbiterState) -> list[tuple[str, str, str]]:
        """(app, session, sign of life) of the apps that have been silent for long enough. Called with the lock."""
        return [
            (name, app.session, app.life)
            for name, app in (*state.apps.items(), *state.away.items())
            if app.life and state.clock - app.heard > SILENT_S
        ]

    def look(self, silent: list[tuple[str, str, str]], seconds: float) -> list[m.AppLeft]:
        """Look at these apps for about ``seconds``, without the lock. Returns which drivers are dead."""
        dead = []
        began = self._clock()
        for _ in silent:
            self._turn += 1
            app, session, life = silent[self._turn % len(silent)]
            try:
                if self._is_gone(life):
                    dead.append(m.AppLeft(app, session))
            except Exception as error:
                # Whatever Ray raises for one app; the deaths of others are told, and this one is looked at again.
                logger.warning("themis: whether the driver of %s lives is not known: %s", app, error)
            if self._clock() - began >= seconds:
                break
        return dead


class ForeignUsage:
    """Whether others than the arbiter's apps have given resources of the Ray cluster back."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._quiet_since = clock()
        #: Ray resource -> what others held at the last look, in its unit.
        self._held: dict[str, float] = {}

    def busy(self) -> None:
        """Reservations are being made or removed, or none waits for others."""
        self._quiet_since, self._held = self._clock(), {}

    def worth_a_look(self) -> bool:
        """Whether Ray's count and the arbiter's are of the same moment."""
        return self._clock() - self._quiet_since >= QUIET_S

    def freed(self, taken: Mapping[str, float], ours: Iterable[Mapping[str, float]], wanted: Collection[str]) -> bool:
        """Whether others hold less than at the last look.

        ``taken``: in the cluster, by Ray resource. ``ours``: the bundles of the reservations that exist. ``wanted``:
        the resources that apps ask for.
        """
        bundles = list(ours)
        held = {name: taken.get(name, 0.0) - sum(each.get(name, 0.0) for each in bundles) for name in wanted}
        # 0.001 is ten of Ray's smallest units: not a difference, but a sum of rounding errors.
        freed = any(held[name] < before - 1e-3 for name, before in self._held.items() if name in held)
        self._held = held
        return freed

"""Which of the apps that are silent have lost their drivers, by what Ray says of the drivers' signs of life.

A sign of life is a placement group that a driver makes when it joins, and that Ray removes when the driver is dead: see
`reservations.sign_of_life`. So the arbiter can tell a driver that stands still from one that is dead.
"""

from __future__ import annotations

from collections.abc import Callable

from themis_bridge import messages as m
from themis_bridge.arbiter_state import ArbiterState

#: After so many seconds of silence the arbiter looks whether a driver is dead. Judgement: ten exchanges were missed.
SILENT_S = 2.0


class Drivers:
    """See the module. is_gone: whether Ray has removed a sign of life; clock: seconds. Both are handed in."""

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

    def look(self, silent: list[tuple[str, str, str]], seconds: float) -> list[m.DriverDied]:
        """Look at these apps for about ``seconds``, without the lock. Returns which drivers are dead."""
        dead = []
        began = self._clock()
        for _ in silent:
            self._turn += 1
            app, session, life = silent[self._turn % len(silent)]
            if self._is_gone(life):
                dead.append(m.DriverDied(app, session))
            if self._clock() - began >= seconds:
                break
        return dead

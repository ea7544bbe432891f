"""The arbiter's gauges in ``ray.util.metrics``; docs/themis.md says what each one is."""

from __future__ import annotations

import math

from ray.util.metrics import Gauge

from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.arbiter_view import shown_rho


class Gauges:
    def __init__(self) -> None:
        self._rho = Gauge(
            "themis_rho",
            "Finish-time fairness of an app; without a GPU, with all that it can use",
            ("app",),
        )
        self._held = Gauge("themis_leases", "GPUs that an app holds", ("app",))
        self._busy = Gauge("themis_utilisation", "Share of the GPUs that are leased")
        self._duration = Gauge("themis_round_seconds", "Seconds of the last round")
        #: The apps at the last call of `set`.
        self._shown: set[str] = set()

    def set(self, state: ArbiterState, round_seconds: float) -> None:
        """Publish the state's figures. ``round_seconds``: of the last round."""
        for gone in self._shown - state.apps.keys():
            self._held.set(0, {"app": gone})
            self._rho.set(math.nan, {"app": gone})
        self._shown = set(state.apps)
        for name in state.apps:
            self._held.set(len(state.leases.of(name)), {"app": name})
            rho = shown_rho(state, name)
            self._rho.set(math.nan if rho is None else rho, {"app": name})
        leased = sum(not lease.waits for lease in state.leases)
        self._busy.set(leased / len(state.gpus) if state.gpus else 0.0)
        self._duration.set(round_seconds)

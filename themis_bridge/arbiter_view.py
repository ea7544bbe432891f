"""What the status says of each app: what it holds and wants, how far behind it is, and why it waits.

Nothing is decided here. All times are seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.fairness import UNSERVED
from themis_bridge.locality import whole_gangs
from themis_bridge.policy import TieBreak, behind, tie_break


def view(state: ArbiterState) -> dict[str, dict[str, Any]]:
    """App -> plain data. ``rho``: at its last report, with the ``rho_gpus`` GPUs that it held then. None if these were
    none: it is then practically infinite and says nothing.

    The other keys: ``best`` (rho if it had all GPUs that it could use from now on), ``age``, ``contention`` (N_avg),
    ``demand`` (the most GPUs that it could use now), ``together`` (how many of one machine it needs at once),
    ``user``, ``weight``, ``usage`` (his decayed GPU seconds), ``reserve`` (GPUs that no auction takes from it),
    ``doubt`` (its rho is divided by it), ``hosts`` (machine -> GPUs), ``leases`` (GPU -> token and remaining seconds)
    and ``waits`` (why it has fewer GPUs than it could use; "" if it has not).
    """
    weights = state.weights()
    return {
        name: {
            "rho": shown_rho(state, name) if app.rho_gpus else None,
            "rho_gpus": app.rho_gpus,
            "best": app.best,
            "age": state.clock - app.joined,
            "contention": state.contention(name),
            "demand": app.wanted,
            "together": app.together,
            "user": state.user_of(name),
            "weight": weights.get(state.user_of(name), 1.0),
            "usage": state.usage.get(state.user_of(name), 0.0),
            "reserve": state.settings.reserves.get(name, 0),
            "doubt": app.distrust,
            "hosts": dict(sorted(Counter(state.gpus[lease.gpu].machine for lease in state.leases.of(name)).items())),
            "leases": {
                lease.gpu: {"token": lease.token, "remaining": lease.expires - state.clock}
                for lease in state.leases.of(name)
            },
            "waits": why_it_waits(state, name),
        }
        for name, app in state.apps.items()
    }


def away(state: ArbiterState) -> dict[str, dict[str, float]]:
    """App that has lost its leases by its silence -> seconds since its last sign, and those until it loses its name."""
    silent = {name: state.clock - app.heard for name, app in state.away.items()}
    return {name: {"silent": each, "name_kept": state.name_kept_s - each} for name, each in silent.items()}


def shown_rho(state: ArbiterState, name: str) -> float | None:
    """rho of an app at its last report, or, if it held no GPU then, the rho if it had got all that it could use.

    None before its first report, and for one that has no bound: that of an app without an end and without a GPU.
    """
    app = state.apps[name]
    rho = app.rho if app.rho is None or app.rho_gpus else app.best
    return None if rho is None or rho >= UNSERVED else rho


def why_it_waits(state: ArbiterState, name: str) -> str:
    """In one line, why the app has fewer GPUs than it could use; "" if it has not."""
    app = state.apps[name]
    if app.rho is not None and app.wanted <= len(state.leases.of(name)):
        return ""
    user, together = state.user_of(name), app.together
    if state.quota_left(user) < together:
        short = "is used up" if together == 1 else f"has no room for the {together} devices that it needs at once"
        return f"the quota of user {user!r}, {state.settings.quotas[user]} devices, {short}"
    promised = [lease.expires for lease in state.leases if lease.heir == name]
    if promised:
        return f"{len(promised)} devices are promised to it, the first within {_until(min(promised), state)}"
    full = sum(name in state.barred(gpu) for gpu in state.gpus)
    if full:
        return f"Ray has no room for what it needs beside {full} devices that no job has; a reservation waits for it"
    free = list(filter(state.leases.is_free, state.gpus))
    if whole_gangs(map(state.gpus.__getitem__, free), together):
        return f"{len(free)} devices are free and about to be offered"
    if together > 1 and not whole_gangs(state.gpus.values(), together):
        return f"it needs {together} devices of one machine at once, and no machine has {together}"
    weights = state.weights()
    own = _behind(state, name, weights)
    ahead = sum(_behind(state, other, weights) < own for other in state.apps if other != name)
    ends = [
        max(state.clock, lease.expires - state.settings.notice_s)
        for lease in state.leases
        if lease.app != name and not lease.waits and not lease.ending
    ]
    if not ends:
        return "all other devices change hands now"
    leased = f"it needs {together} devices of one machine at once; {len(free)} devices are free"
    if together == 1:
        leased = f"all {len(state.gpus)} devices are leased"
    return (
        f"{leased}; the next one of another app is offered in {_until(min(ends), state)}; "
        f"{ahead} apps are further behind"
    )


def _behind(state: ArbiterState, name: str, weights: Mapping[str, float]) -> tuple[bool, float, TieBreak]:
    """Smaller for an app that is further behind, in the order in which apps bid."""
    app = state.apps[name]
    factor = app.factor(name, weights)
    own = tie_break(name, app.joined, state.rounds)
    return behind(bool(state.leases.of(name)), factor * (app.rho or 0.0), factor * app.best, own)


def _until(time: float, state: ArbiterState) -> str:
    return "infinite time" if math.isinf(time) else f"{max(0.0, time - state.clock):.0f} s"

"""Filling devices up to a target time: McNaughton's wrap-around rule with widths.

For a target T every trial gets the width that costs the fewest device-seconds among those at which it ends within T.
Trials on several devices start first. The others fill what is left of the devices up to T, share by share; a trial that
does not fit is cut, and its rest goes to another device, earlier in time. The smallest T that can be filled is searched
for. No trial changes its width. So this is near the best when trials are many, and poor when they are too few to fill
the devices at one width each, which is the case for `mix`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.planners.modes import Floats, Modes
from fluidtune.planning.loads import Width
from fluidtune.planning.placement import Schedule, Segment

#: The search for T starts at this part above the bound and doubles it; it ends when T is known to half of it.
#: A thousandth is what `best` calls close.
_STEP = 0.001
#: The search gives up when T is this many times the bound above it. Then `mix` is better in any case.
_GIVE_UP = 4

#: The fields of a `Segment`. Most fillings are thrown away, and tuples are quicker to make.
_Span = tuple[str, tuple[int, ...], Width, float, float]


def wrap(modes: Modes, bound: float) -> Schedule | None:
    """A schedule whose makespan is the smallest target found, given that ``bound`` seconds is a lower bound.

    None if no target up to a few times the bound can be filled.
    """
    found = None
    low, excess = bound, 0.0
    while found is None and excess < _GIVE_UP:
        target = bound * (1 + excess + 1e-12)
        found = _fill(modes, target)
        if found is None:
            low, excess = target, 2 * excess or _STEP
    if found is None:
        return None
    high = _end(found)
    while high > low * (1 + _STEP / 2):
        middle = (low + high) / 2
        better = _fill(modes, middle)
        if better is None:
            low = middle
        else:
            found, high = better, min(middle, _end(better))
    segments = (Segment(*span) for span in found)
    return Schedule(tuple(sorted(segments, key=lambda segment: (segment.start, segment.devices))))


def _end(spans: list[_Span]) -> float:
    return max(span[4] for span in spans)


def _fill(modes: Modes, target: float) -> list[_Span] | None:
    """The spans of all trials within ``target`` seconds; None if this rule cannot fill them in."""
    fitting = np.where(modes.times <= target, modes.areas, np.inf)
    chosen = fitting.argmin(axis=1)
    rows = np.arange(len(chosen))
    # The tolerance is for the rounding of the sum: a target equal to the bound must not fail for it.
    if fitting[rows, chosen].sum() > modes.n * target * (1 + 1e-9):
        return None
    times = modes.times[rows, chosen]
    order = np.argsort(-times, kind="stable")
    spans: list[_Span] = []
    free_at = np.zeros(modes.n)
    if not _fill_wide(modes, order, chosen, times, target, free_at, spans):
        return None
    # Trials on one device each come first, then halves. The narrowest, which are the most and the shortest, come last.
    for mode in range(modes.c - 1, -1, -1):
        trials = order[chosen[order] == mode]
        if len(trials) and not _fill_shares(modes, mode, trials, times, target, free_at, spans):
            return None
    return spans


def _fill_wide(
    modes: Modes,
    order: np.ndarray,
    chosen: np.ndarray,
    times: Floats,
    target: float,
    free_at: Floats,
    spans: list[_Span],
) -> bool:
    """Fills in trials on two and more devices, longest first, each on the devices that are free soonest."""
    for i in order[chosen[order] >= modes.c]:
        width = int(modes.sizes[chosen[i]])
        devices = np.argsort(free_at, kind="stable")[:width]
        start = float(free_at[devices[-1]])
        end = start + float(times[i])
        if end > target:
            return False
        free_at[devices] = end
        spans.append((modes.ids[i], tuple(devices.tolist()), width, start, end))
    return True


def _fill_shares(
    modes: Modes,
    mode: int,
    trials: np.ndarray,
    times: Floats,
    target: float,
    free_at: Floats,
    spans: list[_Span],
) -> bool:
    """Fills trials on a share 1/p, longest first, into p slots per device, up to ``target``."""
    width, per_device = modes.widths[mode], modes.c - mode
    slots = _slots(free_at, per_device, target)
    device, now = -1, target
    for i, length in zip(trials.tolist(), times[trials].tolist(), strict=True):
        name, room = modes.ids[i], target - now
        if length <= room:
            spans.append((name, (device,), width, now, now + length))
            now += length
            continue
        device_before, before = device, now
        device, start = next(slots, (-1, target))
        if device < 0:
            return False
        now = start + length - room
        if room > 1e-9 * length and now <= before:
            spans.append((name, (device_before,), width, before, target))
        else:
            # The rest of the slot stays empty: the two parts of the trial, if cut, would run at the same time.
            now = start + length
            if now > target:
                return False
        spans.append((name, (device,), width, start, now))
    if device >= 0:
        # The rest of the last device is free for others if it is not shared; the rest of a shared one is given up.
        free_at[device] = now if per_device == 1 else target
    return True


def _slots(free_at: Floats, per_device: int, target: float) -> Iterator[tuple[int, float]]:
    """(device, start) of every slot, longest first. A device whose slots are begun counts as taken up to ``target``."""
    for device in np.argsort(free_at, kind="stable").tolist():
        start = float(free_at[device])
        if start >= target:
            return
        free_at[device] = target
        for _ in range(per_device):
            yield device, start

"""From widths over time to devices: turns the steps of a mixture (`mix`) into segments.

Given which modes run together and for how long, this module orders the steps so that little changes from one to the
next, and gives every trial its devices. A trial stays on its devices while its width stays, and ends when its work is
done. Widths and times are not changed.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.planners.mix import Configuration, Step
from benchmarks.planners.modes import Modes
from fluidtune.planning.placement import Schedule, Segment

#: What a trial holds: its mode, and its devices.
_Held = tuple[int, tuple[int, ...]]


def realise(modes: Modes, steps: list[Step]) -> Schedule | None:
    """The schedule that runs each configuration for its time, one after the other, in an order with few changes.

    If the steps leave work undone because of rounding, they are stretched. None if they leave more than that.
    """
    done = np.zeros(len(modes.ids))
    for step in steps:
        used = np.flatnonzero(step.configuration >= 0)
        done[used] += step.seconds / modes.times[used, step.configuration[used]]
    least = float(done.min(initial=1.0))
    if not least > 1 - 1e-6:
        return None
    stretch = max(1.0, 1.0 / least)
    left: list[float] = [1.0] * len(modes.ids)
    held: dict[int, _Held] = {}
    spans: dict[int, tuple[float, float]] = {}
    segments: list[Segment] = []

    def close(i: int) -> None:
        (mode, devices), (start, end) = held[i], spans.pop(i)
        segments.append(Segment(modes.ids[i], devices, modes.widths[mode], start, end))

    now = 0.0
    for step in _in_order(steps):
        later = now + step.seconds * stretch
        runs = [i for i in np.flatnonzero(step.configuration >= 0).tolist() if left[i] > 0]
        wanted = _assign(modes, step.configuration, runs, held)
        for i in [i for i in spans if wanted.get(i) != held[i]]:
            close(i)
        held = wanted
        for i in runs:
            whole = float(modes.times[i, held[i][0]])
            remains = left[i] - (later - now) / whole
            # Work that is undone only because of rounding (far below the billionth of `check`) needs no segment.
            end = later if remains > 0 else min(later, now + left[i] * whole)
            left[i] = remains if remains > 1e-11 else 0.0
            spans[i] = (spans[i][0] if i in spans else now, end)
        now = later
    for i in list(spans):
        close(i)
    return Schedule(tuple(sorted(segments, key=lambda segment: (segment.start, segment.devices))))


def _in_order(steps: list[Step]) -> list[Step]:
    """The steps, each followed by the one that changes the fewest trials. The order does not change the makespan."""
    if not steps:
        return []
    table = np.array([step.configuration for step in steps])
    waiting = np.arange(1, len(steps))
    at, order = 0, [0]
    while len(waiting):
        nearest = int((table[waiting] != table[at]).sum(axis=1).argmin())
        at = int(waiting[nearest])
        waiting = np.delete(waiting, nearest)
        order.append(at)
    return [steps[i] for i in order]


def _assign(modes: Modes, configuration: Configuration, runs: list[int], held: dict[int, _Held]) -> dict[int, _Held]:
    """Devices for every trial that runs. Trials whose mode stays are not moved unless nothing else fits."""
    kept = {i: held[i] for i in runs if i in held and held[i][0] == configuration[i]}
    placed = _add(modes, configuration, runs, kept, held)
    if placed is None:
        # The shares that stayed are scattered over too many devices: all trials are placed again, widest first.
        placed = _add(modes, configuration, runs, {}, held)
    if placed is None:
        raise RuntimeError(f"a configuration of {len(runs)} trials does not fit {modes.n} devices: a bug")
    return placed


def _add(
    modes: Modes,
    configuration: Configuration,
    runs: list[int],
    kept: dict[int, _Held],
    held: dict[int, _Held],
) -> dict[int, _Held] | None:
    """``kept``, and devices for the other runs; None if these do not fit beside ``kept``."""
    whole = math.lcm(*range(1, modes.c + 1))
    room = [whole] * modes.n
    for mode, devices in kept.values():
        for device in devices:
            room[device] -= whole if mode >= modes.c - 1 else whole // (modes.c - mode)
    placed = dict(kept)
    waiting: dict[int, list[int]] = {}
    for i in runs:
        if i not in kept:
            waiting.setdefault(int(configuration[i]), []).append(i)
    empty = {device: None for device in range(modes.n) if room[device] == whole}
    for mode in sorted(waiting, reverse=True):
        trials = waiting[mode]
        if mode >= modes.c - 1:
            width = mode - modes.c + 2
            if len(trials) * width > len(empty):
                return None
            for i in trials:
                # A trial that grows or shrinks keeps what it can of its devices.
                before = [device for device in held[i][1] if device in empty] if i in held else []
                chosen = before[:width]
                for device in empty:
                    if len(chosen) == width:
                        break
                    if device not in before:
                        chosen.append(device)
                for device in chosen:
                    del empty[device]
                    room[device] = 0
                placed[i] = (mode, tuple(chosen))
            continue
        units = whole // (modes.c - mode)
        fitting = sorted((free, device) for device, free in enumerate(room) if free >= units)
        for _, device in fitting:
            while trials and room[device] >= units:
                placed[trials.pop()] = (mode, (device,))
                room[device] -= units
            if room[device] < whole:
                empty.pop(device, None)
        if trials:
            return None
    return placed

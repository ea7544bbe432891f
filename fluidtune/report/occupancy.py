"""How much of a run's devices trials held over time, from the spans of the fold.

How that looks is decided in pictures.py. *Busy* means held by a trial, at the trial's share, whatever the trial does
with it. A GPU's own counters (`device_sample`) do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from fluidtune.report.fold import Fold, Run, Span, fold_of


@dataclass(frozen=True)
class Occupancy:
    """The use of a run's devices; times are unix seconds."""

    #: Those of trials, sorted by start. One that was open when a driver was killed ends with that driver's last event.
    spans: list[Span]
    #: device -> the disjoint spans in which the run had it, for each device that it ever had, in ascending order.
    available: dict[int, list[tuple[float, float]]]
    #: The spans in which a driver ran: one, and one more for each restore of the experiment.
    drivers: list[tuple[float, float]]

    @property
    def start(self) -> float:
        """When the first driver began; 0 if there are no events."""
        return self.drivers[0][0] if self.drivers else 0.0

    @property
    def end(self) -> float:
        """When the last driver ended, or its last event if it was killed; 0 if there are no events."""
        return self.drivers[-1][1] if self.drivers else 0.0

    def by_device(self) -> dict[int, list[Span]]:
        """device -> the spans on it, for each device that the run ever had."""
        found: dict[int, list[Span]] = {device: [] for device in self.available}
        for span in self.spans:
            for device in span.devices:
                found[device].append(span)
        return found

    @property
    def wall_seconds(self) -> float:
        """Seconds in which a driver ran; the time between a killed driver and the next one does not count."""
        return sum(end - start for start, end in self.drivers)


def occupancy_of(run: Run) -> Occupancy:
    """The use of a run's devices so far. Until the last event, what is still held was held."""
    fold = fold_of(run)
    use = latest(fold, fold.now, math.inf)
    drivers = fold.drivers + ([(fold.driver_since, fold.now)] if fold.driver_since is not None else [])
    use.spans.sort(key=lambda span: (span.start, span.devices))
    return Occupancy(use.spans, dict(sorted(use.available.items())), drivers)


def latest(fold: Fold, now: float, seconds: float) -> Occupancy:
    """The use of the devices in the ``seconds`` before ``now`` (unix seconds), with what is held at this moment.

    Earlier spans are left out, which takes no more time in a long run than in a short one.
    """
    began = now - seconds
    spans = takewhile(lambda span: span.end >= began, reversed(fold.spans))  # they are in the order of their ends
    closed = [*reversed(list(spans)), *(span._replace(end=now) for span in fold.held.values())]
    available = {
        device: [span for span in spans if span[1] >= began]
        + ([(fold.there[device], now)] if fold.there.get(device, now) < now else [])
        for device, spans in fold.available.items()
    }
    return Occupancy([span for span in closed if span.end > span.start], available, [(began, now)])


class Steps(NamedTuple):
    """One device over time as step functions: entry i is the value from times[i] to times[i + 1].

    ``times``: unix seconds, ascending. ``busy``: the share that trials held, at most ``there``. ``trials``: the number
    of trials that held it. ``there``: 1 while the run had the device, else 0. The last entry of each is 0.
    """

    times: np.ndarray
    busy: np.ndarray
    trials: np.ndarray
    there: np.ndarray


def device_steps(use: Occupancy) -> dict[int, Steps]:
    """The steps of each device, in ascending order of devices."""
    return {device: _steps(held, use.available[device]) for device, held in sorted(use.by_device().items())}


def _steps(held: Sequence[Span], spans: Sequence[tuple[float, float]]) -> Steps:
    # One row per change: (time, change of busy, of trials, of there). Cumulated sums by time are the steps.
    changes = [(i.start, i.share, 1.0, 0.0) for i in held] + [(i.end, -i.share, -1.0, 0.0) for i in held]
    changes += [(start, 0.0, 0.0, 1.0) for start, _ in spans] + [(end, 0.0, 0.0, -1.0) for _, end in spans]
    if not changes:
        return Steps(*(np.zeros(0) for _ in range(4)))
    table = np.array(changes)
    times, where = np.unique(table[:, 0], return_inverse=True)
    busy, trials, there = (
        np.cumsum(np.bincount(where.ravel(), weights=table[:, column], minlength=len(times))) for column in (1, 2, 3)
    )
    there = np.round(there)
    # Adding and subtracting 1/3 leaves rounding errors. While trials change places, a log may show both of them on a
    # device for an instant. So the share held is limited to what is there.
    busy = np.clip(np.round(busy, 9), 0.0, there)
    return Steps(times, busy, np.round(trials) * (there > 0), there)


def _integral(steps: Steps, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The integral of ``values``, a column of ``steps``, between consecutive ``edges``, in value seconds."""
    if not len(values):
        return np.zeros(len(edges) - 1)
    total = np.concatenate([[0.0], np.cumsum(np.diff(steps.times) * values[:-1])])
    return np.diff(np.interp(edges, steps.times, total))


def held_seconds(use: Occupancy) -> float:
    """Device-seconds that trials held: the sum of share times seconds, at most `available_seconds`."""
    return float(sum(np.dot(np.diff(steps.times), steps.busy[:-1]) for steps in device_steps(use).values()))


def available_seconds(use: Occupancy) -> float:
    """Device-seconds that the run had while a driver ran; a device that came or went counts while it was there."""
    return sum(end - start for spans in use.available.values() for start, end in spans)


def held_part(use: Occupancy) -> float:
    """`held_seconds` / `available_seconds`, in [0, 1]; 0 if no device was available."""
    available = available_seconds(use)
    return min(1.0, held_seconds(use) / available) if available > 0 else 0.0


def packing_levels(use: Occupancy) -> dict[int, float]:
    """Number of trials on a device at the same time (0 is idle) -> device-seconds, in ascending order."""
    levels: dict[int, float] = {}
    for steps in device_steps(use).values():
        lengths = np.diff(steps.times) * steps.there[:-1] if len(steps.times) else np.zeros(0)
        for level, seconds in zip(steps.trials[:-1], lengths, strict=True):
            if seconds > 0:
                levels[int(level)] = levels.get(int(level), 0.0) + float(seconds)
    return dict(sorted(levels.items()))


class BusyOverTime(NamedTuple):
    """Busy fractions averaged over windows, shape (windows,); NaN in a window in which no device was there."""

    #: device -> the busy part of the time in which it was there.
    devices: dict[int, np.ndarray]
    #: Held over available device-seconds of all devices together.
    total: np.ndarray


def busy_over_time(use: Occupancy, edges: np.ndarray | Sequence[float]) -> BusyOverTime:
    """Exact averages over the windows between ``edges`` (unix seconds, ascending, at least two)."""
    edges = np.asarray(edges, dtype=float)
    busy, there = {}, {}
    for device, steps in device_steps(use).items():
        busy[device] = _integral(steps, steps.busy, edges)
        there[device] = _integral(steps, steps.there, edges)
    nothing = np.zeros(len(edges) - 1)
    return BusyOverTime(
        {device: _fraction(busy[device], there[device]) for device in busy},
        _fraction(sum(busy.values(), nothing), sum(there.values(), nothing)),
    )


def _fraction(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    # Less than a millionth of the largest window is a rounding error at the end of a span.
    enough = whole > 1e-6 * (whole.max() if len(whole) else 0.0)
    return np.clip(np.divide(part, whole, out=np.full(len(whole), np.nan), where=enough & (whole > 0)), 0, 1)

"""Which trial held which device when: from events to intervals, and from intervals to what was held over time.

This module decides what an event means for the devices: when a trial begins and ends to hold a device, and when a
device could have been held. Pure: no clock, no files. How that looks is decided in pictures.py. *Busy* means held by
a trial, at the trial's share, whatever the trial does with it. A GPU's own counters (`device_sample`) do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fluidtune.report.events import EventDict


class Interval(NamedTuple):
    """A trial held ``share`` of a device, 0 < share <= 1, from ``start`` to ``end`` (unix seconds)."""

    trial: str
    device: int
    share: float
    start: float
    end: float


@dataclass(frozen=True)
class Occupancy:
    """The use of a run's devices; times are unix seconds."""

    #: Sorted by start. An interval that was open when a driver was killed ends with that driver's last event.
    intervals: list[Interval]
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

    def by_device(self) -> dict[int, list[Interval]]:
        """device -> its intervals, for each device that the run ever had."""
        found: dict[int, list[Interval]] = {device: [] for device in self.available}
        for interval in self.intervals:
            found[interval.device].append(interval)
        return found

    @property
    def wall_seconds(self) -> float:
        """Seconds in which a driver ran; the time between a killed driver and the next one does not count."""
        return sum(end - start for start, end in self.drivers)


class Held(NamedTuple):
    """The devices that a trial holds, its share of each, and since when, in unix seconds."""

    devices: tuple[int, ...] = ()
    share: float = 0.0
    since: float = 0.0

    @property
    def width(self) -> float:
        return self.share * len(self.devices)


class Replay:
    """The state after some of the events: which devices are there, and which trial holds which of them.

    One thing: each event of the log is one method.
    """

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.available: dict[int, list[tuple[float, float]]] = {}
        self.drivers: list[tuple[float, float]] = []
        self.now = 0.0
        #: When the present driver began; None before the first event and after run_ended.
        self.driver_since: float | None = None
        #: Whether run_ended came and no run_started after it.
        self.over = False
        #: device -> the time since which the run has it.
        self.there: dict[int, float] = {}
        #: What each trial holds; a trial that holds nothing is not in it.
        self.held: dict[str, Held] = {}
        #: Trials on a device where a worker died that the event ascribed to no trial. Their release clears the mark.
        self.hurt: set[str] = set()

    def of(self, trial: str) -> Held:
        """What the trial holds; no devices if it holds none."""
        return self.held.get(trial, Held())

    @property
    def busy(self) -> set[int]:
        """The devices that a trial holds."""
        return {device for held in self.held.values() for device in held.devices}

    def begin_driver(self) -> None:
        self.driver_since = self.now
        self.over = False

    def finish_driver(self, at: float) -> None:
        """The driver ended at ``at``: no trial holds a device any more, and the run has no device."""
        for trial in list(self.held):
            self.release(trial, at)
        for device in list(self.there):
            self.lose(device, at)
        if self.driver_since is not None:
            self.drivers.append((self.driver_since, at))
        self.driver_since = None

    def gain(self, device: int, at: float) -> None:
        self.available.setdefault(device, [])
        self.there.setdefault(device, at)

    def lose(self, device: int, at: float) -> None:
        since = self.there.pop(device, at)
        if at > since:
            self.available[device].append((since, at))

    def release(self, trial: str, at: float) -> None:
        self.hurt.discard(trial)
        held = self.held.pop(trial, Held())
        if at > held.since:
            self.intervals += _intervals(trial, held, at)

    def hold(self, trial: str, devices: Sequence[int], share: float) -> None:
        self.release(trial, self.now)
        if not devices or share <= 0:
            return
        for device in devices:
            if device not in self.available:
                # No event announced the device because the log's first lines are missing: it was there from the start.
                assert self.driver_since is not None
                self.gain(device, self.driver_since)
        self.held[trial] = Held(tuple(devices), min(float(share), 1.0), self.now)

    def make_room(self, devices: Sequence[int], share: float) -> None:
        """A trial starts at ``share`` of ``devices``: no trial there holds more than ``share`` from now on."""
        for device in devices:
            for trial in self.holders(device):
                held = self.held[trial]
                if held.share > share > 0:
                    self.hold(trial, held.devices, share)

    def holders(self, device: int) -> list[str]:
        return [trial for trial, held in self.held.items() if device in held.devices]

    def step(self, event: EventDict) -> None:
        name = event["event"]
        before = self.now
        # The machine's clock may be set back during a run; here time never goes back.
        self.now = max(self.now, float(event["t"]))
        if name == "run_started":
            self.finish_driver(before)
            self.begin_driver()
            for device in event["devices"]:
                self.gain(int(device["device"]), self.now)
            return
        if self.over:
            return  # workers that end after run_ended use no trial's time
        if self.driver_since is None:
            self.begin_driver()
        if name == "trial_started":
            self.make_room(event["devices"], event["share"])
            self.hold(event["trial"], event["devices"], event["share"])
        elif name == "resized":
            self.hold(event["trial"], event["devices"], self.share_after(event))
        elif name == "resize_failed":
            held = self.held.get(event["trial"])
            if held is not None and tuple(event["devices"]) != held.devices:
                self.hold(event["trial"], event["devices"], self.share_after(event))
        elif name in ("trial_ended", "trial_suspended"):
            self.release(event["trial"], self.now)
        elif name == "device_gained":
            self.gain(int(event["device"]), self.now)
        elif name in ("device_lost", "device_returned"):
            device = int(event["device"])
            for trial in self.holders(device):
                self.release(trial, self.now)
            self.lose(device, self.now)
        elif name == "worker_lost":
            if event.get("trial") is not None:
                self.release(event["trial"], self.now)
            else:
                self.hurt.update(self.holders(event["device"]))
        elif name == "recovered":
            if event["trial"] in self.hurt:
                self.release(event["trial"], self.now)
        elif name == "run_ended":
            self.finish_driver(self.now)
            self.over = True

    def latest(self, now: float, seconds: float) -> Occupancy:
        """The use of the devices in the ``seconds`` before ``now`` (unix seconds), with what is held at this moment.

        Earlier intervals are left out, which takes no more time in a long run than in a short one.
        """
        began = now - seconds
        intervals = [each for trial, held in self.held.items() for each in _intervals(trial, held, now)]
        for interval in reversed(self.intervals):  # they are in the order of their ends
            if interval.end < began:
                break
            intervals.append(interval)
        available = {
            device: [span for span in spans if span[1] >= began]
            + ([(self.there[device], now)] if device in self.there else [])
            for device, spans in self.available.items()
        }
        return Occupancy(intervals, available, [(began, now)])

    def share_after(self, event: EventDict) -> float:
        """The trial's share after a resize: the event's own, else as before if its devices are the same, else 1."""
        if event.get("share") is not None:
            return float(event["share"])
        held = self.of(event["trial"])
        return held.share if held.devices and tuple(event["devices"]) == held.devices else 1.0


def _intervals(trial: str, held: Held, end: float) -> list[Interval]:
    return [Interval(trial, device, held.share, held.since, end) for device in held.devices]


def occupancy_of(events: Iterable[EventDict]) -> Occupancy:
    """The use of the devices according to the events. Events that are unknown or do not concern devices are ignored."""
    replay = Replay()
    for event in events:
        replay.step(event)
    if replay.driver_since is not None:
        replay.finish_driver(replay.now)
    replay.intervals.sort(key=lambda interval: (interval.start, interval.device))
    return Occupancy(
        replay.intervals,
        {device: replay.available[device] for device in sorted(replay.available)},
        replay.drivers,
    )


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


def _steps(held: Sequence[Interval], spans: Sequence[tuple[float, float]]) -> Steps:
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

"""A profile measured by a run of FluidTune: what its event log says about the seconds of iterations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from fluidtune.profiles import Profile, ProfileError

Event = Mapping[str, Any]
#: Rounds in which trials' and places' parts of the time are fitted in turn. Later rounds change little.
_ROUNDS = 5
#: Where an iteration ran: (number of devices of the trial, number of trials on its first device).
Place = tuple[int, int]
#: The events after which their trial holds no device. docs/events.md, "Which devices a trial holds", has the whole
#: rule, by which `report.occupancy` reads a log, too.
ENDS = ("trial_ended", "trial_suspended", "worker_lost")


@dataclass(frozen=True)
class Measured:
    """``profile``: of the run's typical trial. ``costs``: each trial's seconds per iteration divided by the typical."""

    profile: Profile
    costs: dict[str, float]


def measure(events: Iterable[Event], name: str = "measured", most: int | None = None) -> Measured:
    """Measures the profile called ``name`` from a run's events.

    An iteration counts if no trial came to its device or left it meanwhile. If no trial ever had one device to itself,
    sharing and scaling are taken to cost nothing. ``most``: how many iterations count at each place, the first ones;
    None: all.

    Raises ProfileError if the events have no iteration.
    """
    samples, pauses = _samples(list(events), most)
    if not samples:
        raise ProfileError("the run has no finished iteration to measure; let it run longer")
    medians = {trial: {place: median(found) for place, found in by.items()} for trial, by in samples.items()}
    costs = {trial: 1.0 for trial in medians}
    typical: dict[Place, float] = {}
    # A long iteration may be due to the trial or to the place. Each is fitted in turn until both are settled.
    for _ in range(_ROUNDS):
        by_place: dict[Place, list[float]] = defaultdict(list)
        for trial, places in medians.items():
            for place, seconds in places.items():
                by_place[place].append(seconds / costs[trial])
        typical = {place: median(found) for place, found in by_place.items()}
        costs = {
            trial: median(seconds / typical[place] for place, seconds in places.items())
            for trial, places in medians.items()
        }
    alone = typical.get((1, 1))
    if alone is None:
        alone = min(seconds * width for (width, _), seconds in typical.items())
    wide = {_digits(width): value for (width, trials), value in typical.items() if trials == 1 and width > 1}
    packed = {trials: value for (width, trials), value in typical.items() if width == 1 and trials > 1}
    resize = {"resize": median(pauses)} if pauses else {}
    return Measured(Profile(name, {"1": alone, **wide}, packed, source="a run of ours", **resize), costs)


def _digits(width: int) -> str:
    """A placement of ``width`` devices with as few digits as possible; the log does not say which nodes it was on."""
    return "9" * (width // 9) + (str(width % 9) if width % 9 else "")


def _when_felt(events: list[Event]) -> list[Event]:
    """The events by time, each start of a trial moved to the begin of its first iteration.

    A trial that is still loading does not slow its neighbours down.
    """
    out: list[tuple[float, int, Event]] = []
    loading: dict[str, Event] = {}
    for number, event in enumerate(events):
        trial = str(event.get("trial"))
        if event["event"] == "trial_started":
            loading[trial] = event
            continue
        if event["event"] == "trial_result" and trial in loading and event.get("seconds"):
            out.append((event["t"] - event["seconds"], number, loading.pop(trial)))
        elif event["event"] in ENDS:
            loading.pop(trial, None)
        elif event["event"] == "run_started":
            loading.clear()
        out.append((event["t"], number, event))
    return [event for *_, event in sorted(out, key=lambda item: item[:2])]


def _samples(events: list[Event], most: int | None) -> tuple[dict[str, dict[Place, list[float]]], list[float]]:
    samples: dict[str, dict[Place, list[float]]] = defaultdict(lambda: defaultdict(list))
    held: dict[str, tuple[int, ...]] = {}
    tenants: dict[int, set[str]] = defaultdict(set)
    #: Trials that had a trial come to their device, or leave it, during the iteration under way.
    disturbed: set[str] = set()
    #: Trials on a device where a worker died that the event ascribed to no trial.
    hurt: set[str] = set()
    pauses: list[float] = []
    taken: Counter[Place] = Counter()

    def move(trial: str, devices: tuple[int, ...]) -> None:
        for device in {*held.get(trial, ()), *devices}:
            disturbed.update(tenants[device])
        for device in held.get(trial, ()):
            tenants[device].discard(trial)
        for device in devices:
            tenants[device].add(trial)
        held[trial] = devices
        hurt.discard(trial)

    for event in _when_felt(events):
        what, trial = event["event"], str(event.get("trial"))
        if what == "trial_started":
            move(trial, tuple(event["devices"]))
            # Its first iteration may contain what a new process does only once.
            disturbed.add(trial)
        elif what == "resized":
            pauses.append(event["seconds"])
            move(trial, tuple(event["devices"]))
            disturbed.add(trial)
        elif what == "run_started":
            for gone in held:
                move(gone, ())
        elif what in ("device_lost", "device_returned"):
            for gone in list(tenants[event["device"]]):
                move(gone, ())
        elif what == "worker_lost" and event.get("trial") is None:
            hurt.update(tenants[event["device"]])
        elif what in ENDS or (what == "recovered" and trial in hurt):
            move(trial, ())
        elif what == "resize_failed" and held.get(trial) and tuple(event["devices"]) != held[trial]:
            move(trial, tuple(event["devices"]))
        elif what == "trial_result" and held.get(trial):
            place = len(held[trial]), len(tenants[held[trial][0]])
            if trial not in disturbed and event.get("seconds") and taken[place] != most:
                taken[place] += 1
                samples[trial][place].append(event["seconds"])
            disturbed.discard(trial)
    if not samples:
        # The run was so short that every iteration was disturbed; these are better than none.
        for event in events:
            if event["event"] == "trial_result" and event.get("seconds"):
                width = event.get("width") or 1.0
                place = (max(1, int(width)), max(1, round(1 / width)) if width < 1 else 1)
                samples[event["trial"]][place].append(event["seconds"])
    return samples, pauses

"""A profile measured by a run of FluidTune: what its event log says about the seconds of iterations."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from fluidtune.profiles import Profile, ProfileError
from fluidtune.report.fold import Fold, Run, fold_of
from fluidtune.report.time_use import starting

#: Rounds in which trials' and places' parts of the time are fitted in turn. Later rounds change little.
_ROUNDS = 5
#: Where an iteration ran: (number of devices of the trial, number of trials on its first device).
Place = tuple[int, int]


@dataclass(frozen=True)
class MeasuredProfile:
    """``profile``: of the run's typical trial. ``costs``: each trial's seconds per iteration divided by the typical."""

    profile: Profile
    costs: dict[str, float]


def measure(run: Run, name: str = "measured", most: int | None = None) -> MeasuredProfile:
    """Measures the profile called ``name`` from a run, or from its events.

    An iteration counts if no trial came to its device or left it meanwhile. If no trial ever had one device to itself,
    sharing and scaling are taken to cost nothing. ``most``: how many iterations count at each place, the first ones;
    None: all.

    Raises ProfileError if the events have no iteration.
    """
    fold = fold_of(run)
    samples = _samples(fold, most)
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
    return MeasuredProfile(Profile(name, {"1": alone, **wide}, packed, source="a run of ours"), costs)


def _digits(width: int) -> str:
    """A placement of ``width`` devices with as few digits as possible; the log does not say which nodes it was on."""
    return "9" * (width // 9) + (str(width % 9) if width % 9 else "")


def _steps(fold: Fold) -> list[tuple[float, float, str, tuple[int, ...], float | None]]:
    """What trials did, by time: unix seconds, the event's number, the trial, its devices from then on, and None.

    For an iteration the last one is its seconds, and there are no devices. A trial that is still loading does not slow
    its neighbours down: it comes at the begin of its first iteration, and one without an iteration is left out.
    """
    steps: list[tuple[float, float, str, tuple[int, ...], float | None]] = []
    steps += ((line.at, line.number, its.trial, (), line.seconds) for its, line in fold.lines())
    loaded = {(part.trial, part.first): part.end for part in starting(fold)}
    for name, trial in fold.trials.items():
        there: tuple[int, ...] = ()
        spans = fold.spans_of(name)
        moves = {note.number for note in trial.notes if note.resize or note.name == "trial_started"}
        for span, after in zip_longest(spans, spans[1:]):
            at = loaded.get((name, span.first), span.start)
            if at < min(span.end, fold.now) and (span.devices != there or span.first in moves):
                steps.append((at, span.first, name, span.devices, None))
                there = span.devices
            if span.last >= 0 and (after is None or after.first != span.last):
                steps.append((span.end, span.last, name, (), None))
                there = ()
    return sorted(steps, key=lambda step: step[:2])


def _samples(fold: Fold, most: int | None) -> dict[str, dict[Place, list[float]]]:
    samples: dict[str, dict[Place, list[float]]] = defaultdict(lambda: defaultdict(list))
    held: dict[str, tuple[int, ...]] = defaultdict(tuple)
    tenants: dict[int, set[str]] = defaultdict(set)
    #: Trials that had a trial come to their device, or leave it, during the iteration under way. The first iteration
    #: after a trial's own start or resize is among them: it may contain what a new process does only once.
    disturbed: set[str] = set()
    taken: Counter[Place] = Counter()
    for _, _, trial, devices, seconds in _steps(fold):
        if seconds is None:
            disturbed.update([trial], *(tenants[device] for device in {*held[trial], *devices}))
            for device in held[trial]:
                tenants[device].discard(trial)
            for device in devices:
                tenants[device].add(trial)
            held[trial] = devices
        elif held[trial]:
            place = len(held[trial]), len(tenants[held[trial][0]])
            if trial not in disturbed and seconds and taken[place] != most:
                taken[place] += 1
                samples[trial][place].append(seconds)
            disturbed.discard(trial)
    if not samples:
        # The run was so short that every iteration was disturbed; these are better than none.
        for its, line in fold.lines():
            if line.seconds:
                width = line.width or 1.0
                place = (max(1, int(width)), max(1, round(1 / width)) if width < 1 else 1)
                samples[its.trial][place].append(line.seconds)
    return samples

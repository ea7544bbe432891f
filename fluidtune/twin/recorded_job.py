"""What a tuning job has to do, as the twin needs it, and how it is read off the event log of a run.

The tuning algorithm's decisions are those of the run: which trials there were, and in which TrialGroup and for how many
iterations each trained before it was paused or stopped. On another number of devices an asynchronous algorithm might
have decided otherwise; a synchronous one would not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from fluidtune.engine.messages import Kind
from fluidtune.profiles import Profile, ProfileError
from fluidtune.twin.measured import measure

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """What a trial does between two decisions of the tuning algorithm: ``iterations`` in ``group``.

    ``told``: the iterations left, as the engine hears; None: it does not hear. ``share``: the share of one device that
    the script asked for, or a whole number of devices.
    """

    group: str
    iterations: int
    told: float | None
    share: float = 1.0


@dataclass(frozen=True)
class RecordedTrial:
    """One trial: its stages, and ``cost``, its seconds per iteration divided by those of the job's profile."""

    trial: str
    stages: tuple[Stage, ...]
    cost: float = 1.0


@dataclass(frozen=True)
class Costs:
    """Seconds that a job spends otherwise than in training.

    ``begin``: from the start of the job until its first worker is asked for. ``cold``: the start of a worker process,
    if no other starts. ``at_once``: not seconds, but how many processes can start at a time and take no longer.
    ``first``: by how much the first iteration in a new process is longer than others, for imports for example.
    ``warm``: from an instruction to the begin of the first iteration in a worker that is there. ``turn``: between two
    iterations.
    """

    begin: float = 0.0
    cold: float = 0.0
    at_once: float = math.inf
    first: float = 0.0
    warm: float = 0.0
    turn: float = 0.0


@dataclass(frozen=True)
class RecordedJob:
    """A tuning job.

    ``synchronous`` and ``concurrency``: by group, as in `fluidtune.engine.GroupAnnounced`. ``pending``: how many new
    trials the search algorithm offers at once; None: all. ``kind``: what its trials turn out to be when they have
    run. ``growable``: they turn out to be able to have several workers.
    """

    trials: tuple[RecordedTrial, ...]
    profile: Profile
    synchronous: Mapping[str, bool]
    concurrency: Mapping[str, int | None] = field(default_factory=dict)
    pending: int | None = None
    kind: Kind = "elastic"
    growable: bool = True
    costs: Costs = Costs()
    #: Settings of `fluidtune.engine.Engine`.
    max_packing: int | None = None
    concurrent_packing: int = 1
    max_workers: int | None = None

    @property
    def widest(self) -> int:
        """The most devices of one node that a trial asks for."""
        return max((math.ceil(stage.share) for trial in self.trials for stage in trial.stages), default=1)


def grid(trials: int, iterations: int, profile: Profile, **settings: Any) -> RecordedJob:
    """A job of ``trials`` equal trials in one synchronous group; ``settings``: further fields of `RecordedJob`."""
    stage = Stage("all", iterations, float(iterations))
    listed = tuple(RecordedTrial(f"trial{k}", (stage,)) for k in range(trials))
    return RecordedJob(listed, profile, {"all": True}, **settings)


def read_job(events: Iterable[Event]) -> RecordedJob:
    """The job of a finished run of FluidTune, from its event log.

    Its profile is the one that the run itself measured. Raises ProfileError if there is no trial or no iteration, or if
    a trial is missing.
    """
    listed = [event for event in events if event.get("event")]
    head = next((event for event in listed if event["event"] == "run_started"), None)
    measured = measure(listed)
    groups = {e["group"]: e for e in listed if e["event"] == "group_announced"}
    synchronous = {name: bool(event["synchronous"]) for name, event in groups.items()}
    stages = _stages(listed)
    if not stages or head is None:
        raise ProfileError("the run's event log has no trial; plan from a run that has trained something")
    stages = _split(stages, synchronous)
    trials = tuple(
        RecordedTrial(trial, tuple(found), measured.costs.get(trial, 1.0))
        for trial, found in stages.items()
        if any(stage.iterations for stage in found)
    )
    # In a run whose trials were known before, as after a restore, no kind is found.
    kinds = Counter(event["kind"] for event in listed if event["event"] == "kind_found") or Counter(
        event["kind"] for event in listed if event["event"] == "trial_added"
    )
    kind: Kind = kinds.most_common(1)[0][0] if kinds else "plain"
    settings = head.get("settings") or {}
    given = settings.get("max_packing")
    concurrency = {name: event.get("concurrency") for name, event in groups.items()}
    on_cores = head["kind"] == "cpu"
    return RecordedJob(
        trials=trials,
        profile=measured.profile,
        synchronous=synchronous,
        concurrency=concurrency,
        pending=_pending(listed),
        kind=kind,
        growable=_growable(listed, kind),
        costs=_costs(listed, head["t"]),
        max_packing=given or (1 if on_cores else None),
        concurrent_packing=max((c or 1 for c in concurrency.values()), default=1) if on_cores and not given else 1,
        max_workers=settings.get("max_workers"),
    )


def _growable(events: list[Event], kind: Kind) -> bool:
    """Whether its trials can have several workers. In logs of older versions exactly elastic trials can."""
    said = [event.get("growable") for event in events if event["event"] == "trial_added"]
    if said and None in said:
        return kind == "elastic"
    return any(said) or any(event["event"] == "can_grow" for event in events)


def _stages(events: list[Event]) -> dict[str, list[Stage]]:
    """By trial, in the order of their first `trial_added`, its stages."""
    found: dict[str, list[Stage]] = {}
    done: dict[str, list[int]] = {}
    for event in events:
        if event["event"] == "trial_added":
            stage = Stage(event["group"], 0, event["iterations"], event.get("share", 1.0))
            found.setdefault(event["trial"], []).append(stage)
            done.setdefault(event["trial"], []).append(0)
        elif event["event"] == "trial_result":
            if event["trial"] not in done:
                raise ProfileError(f"the run's event log does not say what its trial {event['trial']!r} had to do")
            done[event["trial"]][-1] += event.get("iterations", 1)
    # A trial that was moved, or that lost its worker, was added again within its stage.
    return {
        trial: _joined([replace(stage, iterations=count) for stage, count in zip(listed, done[trial], strict=True)])
        for trial, listed in found.items()
    }


def _joined(stages: list[Stage]) -> list[Stage]:
    out = stages[:1]
    for stage in stages[1:]:
        before = out[-1]
        if stage.group == before.group:
            out[-1] = replace(before, iterations=before.iterations + stage.iterations)
        else:
            out.append(stage)
    return out


def _split(stages: dict[str, list[Stage]], synchronous: Mapping[str, bool]) -> dict[str, list[Stage]]:
    """The stages with those split that hold two rungs.

    The last trial of a rung may go on into the next one without a pause; the log then shows one stage where there are
    two.
    """
    following: dict[str, Counter[str]] = defaultdict(Counter)
    for listed in stages.values():
        for one, two in pairwise(listed):
            following[one.group][two.group] += 1
    # The most that was left of a group to any of its trials; a trial that is added again after a move has less left.
    lengths: dict[str, float] = {}
    for listed in stages.values():
        for stage in listed:
            if stage.told is not None:
                lengths[stage.group] = max(lengths.get(stage.group, 0.0), stage.told)
    out = {}
    for trial, listed in stages.items():
        parts: list[Stage] = []
        waiting = deque(listed)
        while waiting:
            stage = waiting.popleft()
            if not synchronous.get(stage.group) or stage.told is None or not stage.iterations > stage.told >= 1:
                parts.append(stage)
                continue
            parts.append(replace(stage, iterations=int(stage.told)))
            rest = stage.iterations - int(stage.told)
            after = following[stage.group].most_common(1)
            name = after[0][0] if after else f"{stage.group}+"
            if waiting and waiting[0].group == name:
                # The trial was moved in the middle of that rung.
                moved = waiting.popleft()
                told = None if moved.told is None else moved.told + rest
                waiting.appendleft(replace(moved, iterations=moved.iterations + rest, told=told))
            else:
                waiting.appendleft(Stage(name, rest, lengths.get(name, float(rest)), stage.share))
                synchronous = {**synchronous, name: True}
        out[trial] = _joined(parts)
    return out


def _pending(events: list[Event]) -> int | None:
    """1 if new trials kept coming after the first result, as from a searcher; None if all were there before."""
    seen: set[str] = set()
    results = False
    for event in events:
        results = results or event["event"] == "trial_result"
        if event["event"] == "trial_added":
            if results and event["trial"] not in seen:
                return 1
            seen.add(event["trial"])
    return None


def _costs(events: list[Event], begun: float) -> Costs:
    # Of each worker, when it was there, and when it was asked for.
    workers = sorted((e["t"], e["t"] - e["seconds"]) for e in events if e["event"] == "worker_started")
    begin = max(0.0, min(asked for _, asked in workers) - begun) if workers else 0.0
    cold = min((there - asked for there, asked in workers), default=0.0)
    at_once = _at_once(workers, cold)
    last: dict[str, float] = {}
    fresh: set[str] = set()
    cold_until = max((event["t"] for event in events if event["event"] == "worker_started"), default=0.0)
    turns, warms = [], []
    for event in events:
        trial, at = str(event.get("trial")), event["t"]
        if event["event"] == "trial_started":
            last[trial] = at
            fresh.add(trial)
        elif event["event"] == "trial_result" and trial in last:
            times = event.get("iterations", 1)
            gap = max(0.0, (at - last[trial]) / times - event["seconds"])
            if trial not in fresh:
                turns.append(gap)
            elif last[trial] > cold_until:
                warms.append(gap)
            fresh.discard(trial)
            last[trial] = at
        elif event["event"] == "resized":
            last.pop(trial, None)
    turn = median(turns) if turns else 0.0
    warm = median(warms) if warms else turn
    return Costs(begin, cold, at_once, _first(events, warm), warm, turn)


def _first(events: list[Event], warm: float) -> float:
    """By how many seconds the first iteration in a new worker is longer than later ones of the same trial."""
    new: dict[int, float] = {}
    begun: dict[str, tuple[int, float]] = {}
    firsts: dict[str, float] = {}
    later: dict[str, list[float]] = defaultdict(list)
    for event in events:
        trial, at = str(event.get("trial")), event["t"]
        if event["event"] == "worker_started":
            new[event["device"]] = at
        elif event["event"] == "trial_started":
            begun[trial] = next(iter(event["devices"]), -1), at
        elif event["event"] == "trial_result":
            device, since = begun.pop(trial, (-1, at))
            if device in new:
                firsts.setdefault(trial, at - max(since, new.pop(device)))
            else:
                later[trial].append(event["seconds"])
    usual = median([seconds for listed in later.values() for seconds in listed] or [math.inf])
    over = [taken - warm - median(later.get(trial) or [usual]) for trial, taken in firsts.items()]
    return max(0.0, median(over)) if over else 0.0


def _at_once(workers: list[tuple[float, float]], cold: float) -> float:
    """How many processes can start at a time as fast as one alone, which takes ``cold`` seconds.

    ``workers``: when each was there, and when it was asked for.
    """
    bursts: list[list[float]] = []  # begin, end, number of processes of starts that overlap
    for there, asked in sorted(workers, key=lambda worker: worker[1]):
        if bursts and asked < bursts[-1][1]:
            bursts[-1][1] = max(bursts[-1][1], there)
            bursts[-1][2] += 1
        else:
            bursts.append([asked, there, 1])
    crowded = [(end - begin, started) for begin, end, started in bursts if started > 1]
    if not crowded:
        return math.inf
    return max(1.0, sum(started for _, started in crowded) * cold / sum(seconds for seconds, _ in crowded))

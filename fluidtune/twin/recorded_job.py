"""What a tuning job has to do, as the twin needs it, and how it is read off the event log of a run.

The algorithm's decisions are taken as they were: which trials there were, how long each trained before it was
paused or stopped, in which TrialGroup. On another number of devices an asynchronous algorithm might have decided
otherwise; a synchronous one would not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from fluidtune.engine import Kind
from fluidtune.profiles import Profile, ProfileError
from fluidtune.profiles.measured import measure

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """What a trial does between two decisions: ``iterations`` in ``group``; ``told``: what the engine is told.

    ``share``: what the script asked for of one device, or a number of devices.
    """

    group: str
    iterations: int
    told: float | None
    share: float = 1.0


@dataclass(frozen=True)
class Work:
    """One trial: its stages, and its iterations' time over the profile's."""

    trial: str
    stages: tuple[Stage, ...]
    cost: float = 1.0


@dataclass(frozen=True)
class Costs:
    """What is not training, seconds.

    ``begin``: from the start of the job to its first worker's request. ``cold``: a new worker process, when it is
    the only one; ``at_once``: how many of them can start at a time and take no longer. ``first``: what the first
    iteration in it takes beyond others, imports for one. ``warm``: from an instruction to the first iteration in a
    worker that is there. ``turn``: between two iterations.
    """

    begin: float = 0.0
    cold: float = 0.0
    at_once: float = math.inf
    first: float = 0.0
    warm: float = 0.0
    turn: float = 0.0


@dataclass(frozen=True)
class Job:
    """A tuning job.

    ``synchronous``: by group, whether it is a batch. ``concurrency``: by group. ``pending``: how many new trials
    the search algorithm offers at once, None for all. ``kind``: what its trials are once they have run.
    """

    works: tuple[Work, ...]
    profile: Profile
    synchronous: Mapping[str, bool]
    concurrency: Mapping[str, int | None] = field(default_factory=dict)
    pending: int | None = None
    kind: Kind = "elastic"
    costs: Costs = Costs()
    #: Settings of the engine.
    max_packing: int | None = None
    concurrent_packing: int = 1
    max_workers: int | None = None
    #: Of the run that this was read off: devices, and its seconds from begin to end. 0 if there was none.
    devices: int = 0
    seconds: float = 0.0


def grid(trials: int, iterations: int, profile: Profile, **settings: Any) -> Job:
    """A grid of equal trials."""
    stage = Stage("all", iterations, float(iterations))
    works = tuple(Work(f"trial{k}", (stage,)) for k in range(trials))
    return Job(works, profile, {"all": True}, **settings)


def read_job(events: Iterable[Event], profile: Profile | None = None) -> Job:
    """The job of a finished run of ours, from its event log.

    ``profile``: None for what the run itself measured.

    Raises ProfileError if the events hold no trial or no iteration.
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
    works = tuple(
        Work(trial, tuple(found), measured.costs.get(trial, 1.0) if profile is None else 1.0)
        for trial, found in stages.items()
        if any(stage.iterations for stage in found)
    )
    kinds = Counter(event["kind"] for event in listed if event["event"] == "kind_found")
    kind: Kind = kinds.most_common(1)[0][0] if kinds else "plain"
    settings = head.get("settings") or {}
    given = settings.get("max_packing")
    concurrency = {name: event.get("concurrency") for name, event in groups.items()}
    on_cores = head["kind"] == "cpu"
    ended = next((event for event in reversed(listed) if event["event"] == "run_ended"), listed[-1])
    return Job(
        works=works,
        profile=profile or measured.profile,
        synchronous=synchronous,
        concurrency=concurrency,
        pending=_pending(listed),
        kind=kind,
        costs=_costs(listed, head["t"]),
        max_packing=given or (1 if on_cores else None),
        concurrent_packing=max((c or 1 for c in concurrency.values()), default=1) if on_cores and not given else 1,
        max_workers=settings.get("max_workers"),
        devices=len(head["devices"]),
        seconds=ended["t"] - head["t"],
    )


def _stages(events: list[Event]) -> dict[str, list[Stage]]:
    """Trial to what it did, in the order of trials."""
    found: dict[str, list[Stage]] = {}
    for event in events:
        if event["event"] == "trial_added":
            stage = Stage(event["group"], 0, event["iterations"], event.get("share", 1.0))
            found.setdefault(event["trial"], []).append(stage)
        elif event["event"] == "trial_result":
            last = found[event["trial"]]
            last[-1] = replace(last[-1], iterations=last[-1].iterations + 1)
    # A trial that was moved, or lost its worker, was added again within its stage.
    return {trial: _joined(listed) for trial, listed in found.items()}


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
    """The last trial of a rung goes on into the next without a pause; its log shows one stage where there are two."""
    following: dict[str, Counter[str]] = defaultdict(Counter)
    for listed in stages.values():
        for one, two in pairwise(listed):
            following[one.group][two.group] += 1
    # What a trial is told when it is added again after a move is only what was left.
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
                # It was moved in the middle of that rung.
                moved = waiting.popleft()
                told = None if moved.told is None else moved.told + rest
                waiting.appendleft(replace(moved, iterations=moved.iterations + rest, told=told))
            else:
                waiting.appendleft(Stage(name, rest, lengths.get(name, float(rest)), stage.share))
                synchronous = {**synchronous, name: True}
        out[trial] = _joined(parts)
    return out


def _pending(events: list[Event]) -> int | None:
    """1 if new trials kept coming after the first result, as from a searcher; None if all were there at once."""
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
    # Each worker: when it was asked for, and when it was there.
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
            gap = max(0.0, at - last[trial] - event["seconds"])
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
    """Seconds of the first iteration in a new worker beyond the same trial's later ones."""
    new: dict[int, float] = {}
    begun: dict[str, tuple[int, float]] = {}
    firsts: dict[str, float] = {}
    later: dict[str, list[float]] = defaultdict(list)
    for event in events:
        trial, at = str(event.get("trial")), event["t"]
        if event["event"] == "worker_started":
            new[event["device"]] = at
        elif event["event"] == "trial_started":
            begun[trial] = event["devices"][0], at
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
    """How many processes started as fast together as ``cold`` says of one; ``workers``: (there, asked) of each."""
    bursts: list[list[float]] = []
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

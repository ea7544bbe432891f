"""The job of a run, as the twin needs it, from the run's event log.

The tuning algorithm's decisions are those of the run: which trials there were, and in which TrialGroup and for how many
iterations each trained before it was paused or stopped. On another number of devices an asynchronous algorithm might
have decided otherwise; a synchronous one would not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import median

from fluidtune.device_kinds import KINDS
from fluidtune.engine.messages import Kind
from fluidtune.profiles import ProfileError
from fluidtune.report.fold import Fold, Iteration, Note, Run, Trial, fold_of
from fluidtune.report.measured import measure
from fluidtune.twin import Costs, RecordedJob, RecordedTrial, Stage


def read_job(run: Run) -> RecordedJob:
    """The job of a finished run of FluidTune, from its events or their fold.

    Its profile is the one that the run itself measured. Raises ProfileError if there is no trial or no iteration, or if
    a trial is missing.
    """
    fold = fold_of(run)
    measured = measure(fold, str(fold.head.get("run") or "run"))
    groups = {note.event["group"]: note.event for note in fold.noted("group_announced")}
    synchronous = {name: bool(event["synchronous"]) for name, event in groups.items()}
    stages = {name: _stages(trial) for name, trial in fold.trials.items() if trial.notes or trial.line_count}
    stages = _split({name: listed for name, listed in stages.items() if listed}, synchronous)
    drivers = fold.noted("run_started")
    if not stages or not drivers:
        raise ProfileError("the run's event log has no trial; plan from a run that has trained something")
    head = drivers[0].event
    trials = tuple(
        RecordedTrial(trial, tuple(found), measured.costs.get(trial, 1.0))
        for trial, found in stages.items()
        if any(stage.iterations for stage in found)
    )
    added = [note.event for note in fold.noted("trial_added")]
    # In a run whose trials were known before, as after a restore, no kind is found.
    kinds = Counter(note.event["kind"] for note in fold.noted("kind_found")) or Counter(e["kind"] for e in added)
    kind: Kind = kinds.most_common(1)[0][0] if kinds else "plain"
    settings = head.get("settings") or {}
    given = settings.get("max_packing")
    concurrency = {name: event.get("concurrency") for name, event in groups.items()}
    devices = KINDS.get(str(head["kind"]))
    on_cores = devices is not None and devices.cores
    return RecordedJob(
        trials=trials,
        profile=measured.profile,
        synchronous=synchronous,
        concurrency=concurrency,
        pending=_pending(fold),
        kind=kind,
        growable=any(trial.growable for trial in fold.trials.values()),
        waits=on_cores and bool(settings.get("parked_memory")),
        reuses=fold.counts["worker_started"] < len(trials),
        costs=_costs(fold, head["t"]),
        max_packing=given or (1 if on_cores else None),
        concurrent_packing=max((c or 1 for c in concurrency.values()), default=1) if on_cores and not given else 1,
        max_workers=settings.get("max_workers"),
    )


def _stages(trial: Trial) -> list[Stage]:
    """The trial's stages. One that was moved, or that lost its worker, was added again within its stage."""
    found: list[Stage] = []
    for what in _in_order(trial, trial.noted("trial_added")):
        if isinstance(what, Note):
            event = what.event
            found.append(Stage(event["group"], 0, event["iterations"], event.get("share", 1.0)))
        elif not found:
            raise ProfileError(f"the run's event log does not say what its trial {trial.trial!r} had to do")
        else:
            found[-1] = replace(found[-1], iterations=found[-1].iterations + int(what.times))
    return _joined(found)


def _in_order(trial: Trial, notes: list[Note]) -> list[Note | Iteration]:
    """The trial's lines of iterations and these of its notes, in the order of the log."""
    found: list[Note | Iteration] = [*notes, *trial.lines()]
    return sorted(found, key=lambda what: what.number)


def _joined(stages: list[Stage]) -> list[Stage]:
    """The stages, each together with those of the same group that follow it."""
    runs = [list(run) for _, run in groupby(stages, key=lambda stage: stage.group)]
    return [replace(run[0], iterations=sum(stage.iterations for stage in run)) for run in runs]


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


def _pending(fold: Fold) -> int | None:
    """1 if new trials kept coming after the first result, as from a searcher; None if all were there before."""
    first = min((trial.line(0).number for trial in fold.trials.values() if trial.line_count), default=math.inf)
    added = (trial.noted("trial_added") for trial in fold.trials.values())
    return 1 if any(notes and notes[0].number > first for notes in added) else None


def _costs(fold: Fold, begun: float) -> Costs:
    started = [note.event for note in fold.noted("worker_started")]
    # Of each worker, when it was there, and when it was asked for.
    workers = sorted((event["t"], event["t"] - event["seconds"]) for event in started)
    begin = max(0.0, min(asked for _, asked in workers) - begun) if workers else 0.0
    cold = min((there - asked for there, asked in workers), default=0.0)
    turns: list[float] = []
    for trial in fold.trials.values():
        last, first = math.nan, True
        begins = [note for note in trial.notes if note.resize or note.name == "trial_started"]
        for what in _in_order(trial, begins):
            if isinstance(what, Note):
                last, first = (math.nan if what.resize else what.event["t"]), True
            elif not math.isnan(last):
                if not first:
                    turns.append(max(0.0, (what.at - last) / what.times - what.seconds))
                last, first = what.at, False
    turn = median(turns) if turns else 0.0
    return Costs(begin, cold, _at_once(workers, cold), _first(fold, turn), turn)


def _first(fold: Fold, turn: float) -> float:
    """By how many seconds the first iteration in a new worker is longer than later ones of the same trial."""
    new: dict[int, float] = {}
    begun: dict[str, tuple[int, float]] = {}
    firsts: dict[str, float] = {}
    later: dict[str, list[float]] = defaultdict(list)
    notes = ((str(note.event.get("trial")), note) for note in fold.noted("worker_started", "trial_started"))
    lines = ((trial.trial, line) for trial, line in fold.lines())
    steps: list[tuple[str, Note | Iteration]] = [*notes, *lines]
    for trial, what in sorted(steps, key=lambda step: step[1].number):
        if isinstance(what, Iteration):
            device, since = begun.pop(trial, (-1, what.at))
            if device in new:
                firsts.setdefault(trial, what.at - max(since, new.pop(device)))
            else:
                later[trial].append(what.seconds)
        elif what.name == "worker_started":
            new[what.event["device"]] = what.event["t"]
        else:
            begun[trial] = next(iter(what.event["devices"]), -1), what.event["t"]
    usual = median([seconds for listed in later.values() for seconds in listed] or [math.inf])
    over = [taken - turn - median(later.get(trial) or [usual]) for trial, taken in firsts.items()]
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

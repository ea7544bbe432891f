"""Events for tests: functions that make one event, and `random_run`, which makes those of a run; logs and tables."""

from __future__ import annotations

import heapq
import io
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from fluidtune.report.events import EventDict, EventLog
from fluidtune.report.schema import check_event


def log_in(directory: Path, clock: Callable[[], float] = time.time) -> EventLog:
    """The event log in ``directory``, open."""
    log = EventLog("lost: %s")
    log.open(directory, clock)
    return log


def ev(t: float, event: str, /, **fields: Any) -> EventDict:
    """One event at ``t`` (s), as the reader returns it; checked against the schema."""
    check_event(event, fields)
    return {"t": float(t), "event": event, **fields}


def begin(t: float, devices: int, **changes: Any) -> EventDict:
    fields: dict[str, Any] = {
        "run": "test",
        "ray": "2.50",
        "fluidtune": "0.1",
        "python": "3.11",
        "machine": "a test",
        "kind": "cpu",
        "devices": [{"device": device, "node": "local"} for device in range(devices)],
        "settings": {},
        "algorithm": "grid",
        "metric": "loss",
        "mode": "min",
    }
    return ev(t, "run_started", **{**fields, **changes})


def added(t: float, trial: str, group: str = "g") -> EventDict:
    return ev(t, "trial_added", trial=trial, group=group, kind="elastic", iterations=10, growable=True)


def group(t: float, name: str = "g", synchronous: bool = True) -> EventDict:
    return ev(t, "group_announced", group=name, synchronous=synchronous, algorithm="grid")


def started(t: float, trial: str, *devices: int, share: float = 1.0, resumed: bool = False) -> EventDict:
    return ev(t, "trial_started", trial=trial, devices=list(devices), share=share, resumed=resumed)


def resizing(t: float, trial: str, before: list[int], after: Sequence[int], **why: Any) -> EventDict:
    """``why``: the fields of the reason; `words` if there are none."""
    devices = {"devices_from": before, "devices_to": list(after)}
    return ev(t, "resize_started", trial=trial, **devices, **{"reason": "words", **why})


def resized(t: float, trial: str, *devices: int) -> EventDict:
    return ev(t, "resized", trial=trial, devices=list(devices))


def result(
    t: float, trial: str, iteration: int, seconds: float, width: float, metric: float | None = None
) -> EventDict:
    return ev(t, "trial_result", trial=trial, iteration=iteration, seconds=seconds, width=width, metric=metric)


def ended(t: float, trial: str, ending: str = "stopped") -> EventDict:
    return ev(t, "trial_ended", trial=trial, ending=ending)


def over(t: float, seconds: float = 0.0, trials: int = 0, best: Any = None) -> EventDict:
    return ev(t, "run_ended", seconds=seconds, trials=trials, best=best)


def written(directory: Path, events: list[EventDict]) -> Path:
    """The path of an event log with these events, in a new directory."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "fluid_events.jsonl"
    log.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return log


def text_of(picture: RenderableType, width: int = 120) -> str:
    """What a terminal of ``width`` columns shows."""
    out = io.StringIO()
    Console(file=out, width=width).print(picture)
    return out.getvalue()


def random_run(seed: int, *, devices: int, trials: int, iterations: int = 20, losses: bool = True) -> list[EventDict]:
    """A deterministic run: trials are packed while many wait, and grow when few are left. It begins at t = 1000 s."""
    rng = random.Random(seed)
    events = [begin(1000.0, devices, kind="emulated", run=f"random {seed}"), group(1000.0)]
    waiting = [f"train_4f2e1_{number:05d}" for number in range(trials)]
    events += [added(1000.0, trial) for trial in waiting]
    load = {trial: rng.uniform(0.5, 1.5) for trial in waiting}
    left = {trial: rng.randint(1, 2 * iterations) for trial in waiting}
    held: dict[str, tuple[list[int], float]] = {}
    room = dict.fromkeys(range(devices), 1.0)
    due: list[tuple[float, str, float, float]] = []  # end of an iteration, its trial, seconds and width
    now = 1000.0

    def iterate(trial: str, delay: float = 0.0) -> None:
        where, share = held[trial]
        width = share * len(where)
        seconds = load[trial] * (1.4 if width < 1 else width**-0.8) * rng.uniform(0.95, 1.05)
        heapq.heappush(due, (now + delay + seconds, trial, seconds, width))

    def release(trial: str) -> None:
        where, share = held.pop(trial)
        for device in where:
            room[device] += share

    while True:
        share = 0.5 if len(waiting) + len(held) > devices else 1.0
        for device in room:
            while waiting and room[device] >= share - 1e-9:
                trial = waiting.pop(0)
                held[trial] = ([device], share)
                room[device] -= share
                events.append(started(now, trial, device, share=share))
                iterate(trial)
        if not due:
            return [*events, over(now, now - 1000.0, trials)]
        now, trial, seconds, width = heapq.heappop(due)
        left[trial] -= 1
        events.append(result(now, trial, left[trial], seconds, width, rng.random()))
        idle = [device for device in room if room[device] > 1 - 1e-9]
        if left[trial] <= 0:
            release(trial)
            events.append(ended(now, trial))
        elif losses and rng.random() < 0.002:
            lost = held[trial][0][0]
            release(trial)
            events.append(ev(now, "worker_lost", worker=f"w{lost}", device=lost, reason="killed"))
            events.append(ev(now, "trial_suspended", trial=trial))
            waiting.insert(0, trial)
        elif idle and not waiting and room[held[trial][0][0]] + held[trial][1] > 1 - 1e-9:
            was = held[trial][0]
            grown = was + idle[: len(was)]
            events.append(resizing(now, trial, was, grown))
            for device in grown:
                room[device] = 0.0
            held[trial] = (grown, 1.0)
            events.append(resized(now, trial, *grown))
            iterate(trial, 0.2)
        else:
            iterate(trial)

"""How long a resize takes: from the decision to the first step with the new number of workers.

``python -m benchmarks.resize --json [--devices cpu:2|gpu:2] [--quick]``. One trial
(resize_job.py) repeatedly grows from one worker to two and shrinks back. `fluid` resizes in place, in a real FluidTune
run: short trials come and go, and the engine resizes the long trial for them. `stock` is stock Ray Tune's pause and
resume: a scheduler pauses the trial, changes its resources, and lets it continue in a new process. Both are timed from
the decision (the engine's instruction; the scheduler's PAUSE) until the driver has the first result of a step with the
new workers.

A growth starts a process, if none is ready. ``divided`` is the time from the decision to the first divided call, and
``stall`` by how much the trial's calls took longer meanwhile: checks, and weights that are sent.

A side that takes longer than ``--limit`` is ended; ``not_ended`` names it, and it has no other figures (side_limit.py).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT, finish, parser, result, run_process, say
from benchmarks.side_limit import SideLimit
from benchmarks.sides import OURS, under_fluidtune
from fluidtune.report import read_events

JOB = str(ROOT / "benchmarks" / "resize_job.py")
DEVICES = ("cpu:2", "gpu:2")
KINDS = ("grow", "shrink")
#: Kind -> the seconds of each resize of that kind.
Resizes = dict[str, list[float]]


def resizes(events: Iterable[Mapping[str, Any]]) -> Resizes:
    """The resizes in a FluidTune run's events: seconds of each ``grow`` and ``shrink``, see above."""
    found: Resizes = {"grow": [], "shrink": [], "divided": [], "stall": []}
    #: trial -> seconds from the decision to its newest worker's coming.
    came: dict[str, float] = {}
    #: trial -> its resize that is under way: when it was decided, its kind, and whether the devices have changed.
    under_way: dict[str, dict[str, Any]] = {}
    for event in events:
        name, trial = event["event"], event.get("trial")
        if name == "resize_started":
            kind = "grow" if len(event["devices_to"]) > len(event["devices_from"]) else "shrink"
            under_way[trial] = {"since": event["t"], "kind": kind, "done": False}
        elif name == "resized" and trial in under_way:
            under_way[trial]["done"] = True
            came.pop(trial, None)
            if under_way[trial]["kind"] == "grow":
                came[trial] = event["t"] - under_way[trial]["since"]
        elif name == "divided" and trial in came:
            found["divided"].append(came.pop(trial) + event["seconds"])
            found["stall"].append(event["stall"])
        elif name == "trial_result" and trial in under_way and under_way[trial]["done"]:
            resize = under_way.pop(trial)
            found[resize["kind"]].append(event["t"] - resize["since"])
        elif name in ("resize_failed", "trial_ended", "trial_suspended"):
            under_way.pop(trial, None)
    return found


def fluid(times: int, devices: str, limit: float) -> Resizes:
    """The resizes of a run with ``times`` guests under FluidTune. NotEnded if it takes longer than ``limit`` s."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
        out = str(Path(directory) / "out.json")
        job = ("guests", *gpus(devices), "--times", str(times), "--storage", directory, "--out", out)
        run_process(under_fluidtune(devices, JOB, *job), limit)
        return resizes(read_events(Path(directory) / "job" / "fluid_events.jsonl"))


def gpus(devices: str) -> tuple[str, ...]:
    """The arguments by which the job knows its devices."""
    return ("--gpus", "2") if devices.startswith("gpu") else ()


def stock(times: int, devices: str, limit: float) -> Resizes:
    """``times`` growths and ``times`` shrinks by pause and resume under stock Ray Tune."""
    return measured(limit, JOB, "pause", *gpus(devices), "--times", str(times))


def measured(limit: float, *job: str) -> Resizes:
    """Run a script with ``python`` for ``limit`` s at most and return the measurements that it writes down."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
        out = Path(directory) / "out.json"
        run_process([sys.executable, *job, "--storage", directory, "--out", str(out)], limit)
        return json.loads(out.read_text())


def measures(quick: bool, devices: str) -> dict[str, Callable[[float], Resizes]]:
    """Name of a side -> a function that runs it for so many seconds at most."""
    times = 1 if quick else 3
    return {OURS: partial(fluid, 2 * times, devices), "stock": partial(stock, times, devices)}


def gathered(sides: Mapping[str, Callable[[float], Resizes]], times: int, limit: SideLimit) -> dict[str, Resizes]:
    """Run all sides in turn, ``times`` times. Side -> the resizes of all its runs, of the sides that have ended."""
    found: dict[str, Resizes] = {}
    for turn in range(times):
        for name, run in sides.items():
            resized = limit.run(name, run)
            if resized is not None:
                for kind, seconds in resized.items():
                    found.setdefault(name, {}).setdefault(kind, []).extend(seconds)
                say(f"[{turn + 1}/{times}] {name}: {json.dumps(resized)}")
    return {name: of for name, of in found.items() if name not in limit.not_ended}


def side(found: Resizes) -> dict[str, Any]:
    """The median of each list, and the lists under ``all``."""
    return {**{name: median(values) for name, values in found.items() if values}, "all": found}


def main() -> None:
    options = parser(
        "Growing 1 to 2 workers and shrinking back, beside stock Ray Tune's pause and resume.", repeats=True, limit=True
    )
    options.add_argument("--devices", choices=DEVICES, default=DEVICES[0], help="on gpu:2 tensors go by NCCL")
    args = options.parse_args()
    limit = SideLimit(args.limit)
    found = gathered(measures(args.quick, args.devices), args.repeats, limit)
    limit.require(OURS)
    missing = [kind for kind in KINDS if not found[OURS][kind]]
    if missing:
        raise SystemExit(
            f"FluidTune did not {' or '.join(missing)} the trial in this run: on a machine that "
            "is busy with other things two workers may be no faster than one; try again, or with more --repeats"
        )
    sides = {name: side(values) for name, values in found.items()}
    by_kind = {
        name: {kind: side[kind] / sides[OURS][kind] for kind in KINDS} for name, side in sides.items() if name != OURS
    }
    ratios = {name: min(kinds.values()) for name, kinds in by_kind.items()}
    figures = result(
        "resize",
        args.devices,
        "real",
        sides=sides,
        ratio=min(ratios.values(), default=None),
        ratios=ratios,
        not_ended=limit.not_ended,
        by_kind=by_kind,
    )
    finish(figures, args.json)


if __name__ == "__main__":
    main()

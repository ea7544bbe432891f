"""How long a resize takes: from the decision to the first step with the new number of workers.

``python -m benchmarks.resize --json [--devices cpu:2|gpu:2] [--backend torch|horovod] [--quick]``. One trial
(resize_job.py) repeatedly grows from one worker to two and shrinks back. `fluid` resizes in place, in a real FluidTune
run: short trials come and go, and the engine resizes the long trial for them. `stock` is stock Ray Tune's pause and
resume: a scheduler pauses the trial, changes its resources, and lets it continue in a new process. Both are timed from
the decision (the engine's instruction; the scheduler's PAUSE) until the driver has the first result of a step with the
new workers.

A growth for which FluidTune first had to start a process is listed as ``cold`` and not compared, because the trial
trains on meanwhile. ``stall`` is the time for which an in-place resize interrupted training.

With ``--backend horovod`` the collectives of `fluid` are Horovod's, and there is a third side, `elastic_ray`: Horovod's
own ElasticRayExecutor (resize_horovod.py), timed from its driver's decision to the first step of the new group.
``grow_stall`` and ``shrink_stall`` are the longest time without a step meanwhile.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT, finish, parser, result, run_process, say
from benchmarks.sides import OURS, under_fluidtune
from fluidtune.elastic.backends import BACKENDS
from fluidtune.elastic.backends.horovod_there import require_horovod
from fluidtune.report import read_events

JOB = str(ROOT / "benchmarks" / "resize_job.py")
DEVICES = ("cpu:2", "gpu:2")
HOROVOD_JOB = str(ROOT / "benchmarks" / "resize_horovod.py")
KINDS = ("grow", "shrink")


def resizes(events: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The resizes in a FluidTune run's events: seconds of each ``grow``, ``shrink``, ``cold`` growth and ``stall``."""
    found: dict[str, list[float]] = {"grow": [], "shrink": [], "cold": [], "stall": []}
    #: trial -> its resize that is under way: when it was decided, its kind, and whether the devices have changed.
    under_way: dict[str, dict[str, Any]] = {}
    for event in events:
        name, trial = event["event"], event.get("trial")
        if name == "resize_started":
            kind = "grow" if len(event["devices_to"]) > len(event["devices_from"]) else "shrink"
            under_way[trial] = {"since": event["t"], "kind": kind, "done": False}
        elif name == "worker_started":
            for resize in under_way.values():
                resize["kind"] = "cold" if resize["kind"] == "grow" else resize["kind"]
        elif name == "resized" and trial in under_way:
            under_way[trial]["done"] = True
            found["stall"].append(event["seconds"])
        elif name == "trial_result" and trial in under_way and under_way[trial]["done"]:
            resize = under_way.pop(trial)
            found[resize["kind"]].append(event["t"] - resize["since"])
        elif name in ("resize_failed", "trial_ended", "trial_suspended"):
            under_way.pop(trial, None)
    return found


def fluid(times: int, backend: str, devices: str) -> dict[str, list[float]]:
    """The resizes of a run with ``times`` guests under FluidTune."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
        out = str(Path(directory) / "out.json")
        job = ("guests", *gpus(devices), "--times", str(times), "--storage", directory, "--out", out)
        run_process(under_fluidtune(devices, JOB, *job, settings=["--backend", backend]))
        return resizes(read_events(Path(directory) / "job" / "fluid_events.jsonl"))


def gpus(devices: str) -> tuple[str, ...]:
    """The arguments by which the job knows its devices."""
    return ("--gpus", "2") if devices.startswith("gpu") else ()


def stock(times: int, devices: str) -> dict[str, list[float]]:
    """``times`` growths and ``times`` shrinks by pause and resume under stock Ray Tune."""
    return measured(JOB, "pause", *gpus(devices), "--times", str(times))


def elastic_ray(times: int) -> dict[str, list[float]]:
    """``times`` growths and ``times`` shrinks by Horovod's own driver on Ray."""
    return measured(HOROVOD_JOB, "--times", str(times))


def measured(*job: str) -> dict[str, list[float]]:
    """Run a script with ``python`` and return the measurements that it writes down."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
        out = Path(directory) / "out.json"
        run_process([sys.executable, *job, "--storage", directory, "--out", str(out)])
        return json.loads(out.read_text())


def side(found: dict[str, list[float]]) -> dict[str, Any]:
    """The median of each list, and the lists under ``all``."""
    return {**{name: median(values) for name, values in found.items() if values}, "all": found}


def main() -> None:
    options = parser(
        "Growing 1 to 2 workers and shrinking back, beside stock Ray Tune's pause and resume.", repeats=True
    )
    options.add_argument("--backend", choices=sorted(BACKENDS), default="torch", help="the collective library")
    options.add_argument("--devices", choices=DEVICES, default=DEVICES[0], help="on gpu:2 the sums are NCCL's")
    args = options.parse_args()
    if args.backend == "horovod":
        require_horovod()
    runs = []
    for turn in range(args.repeats):
        runs.append({OURS: fluid(2 if args.quick else 6, args.backend, args.devices)})
        runs[-1]["stock"] = stock(1 if args.quick else 3, args.devices)
        if args.backend == "horovod":
            runs[-1]["elastic_ray"] = elastic_ray(1 if args.quick else 3)
        say(f"[{turn + 1}/{args.repeats}] {json.dumps(runs[-1])}")
    found = {name: {kind: [s for run in runs for s in run[name][kind]] for kind in runs[0][name]} for name in runs[0]}
    missing = [kind for kind in KINDS if not found[OURS][kind]]
    if missing:
        raise SystemExit(
            f"FluidTune did not {' or '.join(missing)} the trial with a warm worker in this run: on a machine that "
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
        backend=args.backend,
        sides=sides,
        ratio=min(ratios.values()),
        ratios=ratios,
        by_kind=by_kind,
    )
    finish(figures, args.json)


if __name__ == "__main__":
    main()

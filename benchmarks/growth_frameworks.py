"""How long a training with Lightning or Transformers takes to grow: from the order to the first step of two workers.

``python -m benchmarks.growth_frameworks --json [--quick] [--repeats N]``; needs benchmarks/frameworks/requirements.txt.
The jobs are in growth_job.py. `lightning` and `transformers` are trials of unedited scripts under FluidTune, which grow
whenever a short trial has ended; the order is the engine's. A growth for which a process was started is ``cold``.
`train_v2` is Ray Train's elastic group, which begins again from its checkpoint when a second node has joined; the order
is that it has joined, and Ray looks for it each second, not each minute as is its default. `restart` is Lightning's
own way: the process saves and ends, and one with two devices begins; the order is that it is asked to.

``grow``: seconds from the order to the first step with two workers, with a process that was there. ``cold``: the same
where a process was started for it, as on all rivals' sides. ``stall``: the longest time without a step meanwhile; for
our sides, for how long the trial was interrupted. ``ratios``: rivals' ``cold`` by that of `lightning`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.common import ROOT, finish, parser, ratios, result, run_process, say
from benchmarks.resize import Resizes, resizes
from benchmarks.side_limit import SideLimit
from benchmarks.sides import under_fluidtune
from fluidtune.report import read_events

JOB = str(ROOT / "benchmarks" / "growth_job.py")
OURS, RIVALS = ("lightning", "transformers"), ("train_v2", "restart")


def grown(side: str, times: int, limit: float) -> Resizes:
    """The growths of one run. NotEnded if it takes longer than ``limit`` s."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
        out = Path(directory) / "out.json"
        job = (side, "--times", str(times), "--storage", directory, "--out", str(out))
        ours = side in OURS
        run_process(under_fluidtune("cpu:2", JOB, *job) if ours else [sys.executable, JOB, *job], limit)
        found = (
            resizes(read_events(Path(directory) / "job" / "fluid_events.jsonl"))
            if ours
            else json.loads(out.read_text())
        )
    if not ours:
        found["grow"], found["cold"] = [], found["grow"]
    return {kind: found[kind] for kind in ("grow", "cold", "stall")}


def main() -> None:
    args = parser(__doc__.splitlines()[0], repeats=True, limit=True).parse_args()
    times = 1 if args.quick else 3
    limit = SideLimit(args.limit)
    # The first growth of a trial waits for a process.
    runs: dict[str, Callable[[float], Resizes]] = {side: partial(grown, side, times + 2) for side in OURS}
    runs |= {side: partial(grown, side, times) for side in RIVALS}
    found: dict[str, Resizes] = {}
    for turn in range(args.repeats):
        for side, run in runs.items():
            seen = limit.run(side, run)
            for kind, seconds in (seen or {}).items():
                found.setdefault(side, {}).setdefault(kind, []).extend(seconds)
            say(f"[{turn + 1}/{args.repeats}] {side}: {json.dumps(seen)}")
    limit.require(OURS[0])
    sides = {
        side: {**{kind: median(of) for kind, of in kinds.items() if of}, "all": kinds}
        for side, kinds in found.items()
        if side not in limit.not_ended
    }
    if missing := [side for side in OURS if "cold" not in sides.get(side, {})]:
        raise SystemExit(f"{' and '.join(missing)} did not grow: the machine is busy; try again")
    others = ratios({side: of for side, of in sides.items() if side not in OURS[1:]}, OURS[0], "cold")
    shown = {
        "sides": sides,
        "ratio": min(others.values(), default=None),
        "ratios": others,
        "not_ended": limit.not_ended,
    }
    finish(result("growth_frameworks", "cpu:2", "real", **shown), args.json)


if __name__ == "__main__":
    main()

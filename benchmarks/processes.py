"""A HyperBand search on digits whose trials have forked processes, or plain new ones; and how often they start.

``python -m benchmarks.processes --json [--repeats N] [--devices cpu:N] [--before COMMIT]``. The search is that of
`tune_vs_fluid` on cores. Each side is a run under FluidTune, start-up included: `forked` as it is by default, `plain`
with ``--no-fork-server``. Sides run in turn; every second round runs them in the other order. ``sides`` has medians;
``ratios`` divide the ``seconds`` of `plain` by those of `forked`.

``counted`` has no times. It is the search of `counted_search`, with and without checkpoints, once `here`, once on
`stock` Ray Tune, and once `before`: with the files of COMMIT. Each has ``steps`` that the trials did, how many of them
``twice``, and in how many ``processes``. Those of FluidTune have ``started`` as well: the processes by the event log,
with spares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.commits import checkout, jobs
from benchmarks.common import ROOT, Figures, cores, environment, finish, parser, ratios, result, run_process, say
from benchmarks.sides import OURS, sides, under_fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events

#: Side -> further options of ``fluidtune run``.
SETTINGS = {"forked": [], "plain": ["--no-fork-server"]}

#: The script whose steps are counted.
COUNTED = str(ROOT / "benchmarks" / "counted_search.py")


def counted(sources: Path | None, devices: str, quick: bool, *more: str) -> Figures:
    """Run the search whose steps are counted, with the FluidTune of ``sources``; None: without."""
    size = ("9" if quick else "17", "9")  # one bracket, or all
    with tempfile.TemporaryDirectory(prefix="fluidtune-counted-") as folder:
        args = [COUNTED, str(cores(devices)), *size, folder, *more]
        command = [sys.executable, *args] if sources is None else under_fluidtune(devices, *args)
        environ = {**environment(), "PYTHONPATH": str(sources or ROOT)}
        output = run_process(command, cwd=sources or ROOT, environ=environ).output
        found: Figures = json.loads(next(line for line in output.splitlines() if line.startswith('{"steps"')))
        if sources is not None:
            events = read_events(Path(folder, "job", EVENT_LOG_NAME))
            found["started"] = sum(event["event"] == "worker_started" for event in events)
    say(f"{'stock' if sources is None else sources} {' '.join(more)}: {found}")
    return found


def counted_on_all(devices: str, quick: bool, before: str | None) -> dict[str, dict[str, Figures]]:
    """By kind of search and side, what `counted` returns."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-before-") as folder:
        sources: dict[str, Path | None] = {"here": ROOT, "stock": None}
        if before is not None:
            sources["before"] = Path(folder, "before")
            checkout(before, Path(folder, "before"))
        kinds = {"with_checkpoints": ["--checkpoints"], "without": []}
        return {
            kind: {side: counted(place, devices, quick, *more) for side, place in sources.items()}
            for kind, more in kinds.items()
        }


def main() -> None:
    made = parser(__doc__.splitlines()[0], repeats=True)
    made.add_argument("--devices", default="cpu:2", help="cpu:N")
    made.add_argument("--before", metavar="COMMIT", help="count with an earlier commit's files, too")
    options = made.parse_args()
    cores(options.devices)
    job = jobs(emulated=False, quick=options.quick)["hyperband"]
    run = {name: sides(options.devices, job, settings=settings)[OURS] for name, settings in SETTINGS.items()}
    runs: dict[str, list[Figures]] = {name: [] for name in SETTINGS}
    for turn in range(options.repeats):
        for name in sorted(SETTINGS, reverse=bool(turn % 2)):
            runs[name].append(run[name]())
            say(f"{name}: {runs[name][-1]['seconds']:.2f} s")
    keys = ("seconds", "fit_seconds", "first_result_seconds", "best")
    found = {name: {key: median(each[key] for each in of) for key in keys} for name, of in runs.items()}
    numbers = counted_on_all(options.devices, options.quick, options.before)
    shown = {"sides": found, "all": runs, "ratios": ratios(found, "forked", "seconds"), "counted": numbers}
    finish(result("processes", options.devices, "real", **shown, ratio=shown["ratios"]["plain"]), options.json)


if __name__ == "__main__":
    main()

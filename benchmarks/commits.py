"""FluidTune at an earlier commit beside FluidTune as it is here: the same tuning jobs, in pairs in turn.

``python -m benchmarks.commits --before COMMIT --json [--job NAME ...] [--devices cpu:N|emulated:N] [--pairs N]``.
COMMIT is any name that git knows in this repository. The jobs are those of `tune_vs_fluid` and `launch`: on cores
hyperband, asha, short, launch, small (HyperBand) and small_asha; on emulated devices one for each algorithm.

Each side is a copy of its commit's files with that commit's own script (job.py), run by this Python. A pair runs both
sides one after the other; every second pair begins with the other side. ``seconds`` is the time of the whole process,
start-up included, `launch` that from a free place to a trial's first result. ``ratios`` are medians, `before` divided
by `here`: above 1 it has become faster. ``rates`` are iterations per second of ``fit`` (medians), because an
asynchronous algorithm does not do the same work in every run. ``bound_ratios`` are medians over the runs here of
``bound_ratio``, as in `tune_vs_fluid`.

A side that takes longer than ``--limit``, by default 20 times the job's first run, is ended. ``not_ended`` names it by
job, with the seconds that it had taken. That job goes no further and is in ``jobs`` only; the other jobs run all the
same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.algorithms import ALGORITHMS
from benchmarks.common import PROCESS_LIMIT_S, ROOT, Figures, cpu_or_emulated, finish, parser, result, run_process, say
from benchmarks.launch import launch_job
from benchmarks.scaled_profile import scaled
from benchmarks.side_limit import SideLimit
from benchmarks.tune_vs_fluid import FULL, QUICK, emulated_job
from fluidtune.profiles import DEFAULT

#: Runs one job on our side, in the checkout that is the current directory.
RUN = """
import json, sys
from benchmarks.sides import OURS, sides
devices, profile, *job = sys.argv[1:]
print(json.dumps(sides(devices, job, profile)[OURS]()))
"""


#: What is compared of each job, see `compared`.
COMPARED = ("medians", "ratios", "rates", "bound_ratios")


def jobs(emulated: bool, quick: bool) -> dict[str, list[str]]:
    """Name of a job -> its arguments for job.py: those of `tune_vs_fluid` and `launch`."""
    if emulated:
        return {name: ["--algorithm", name, *emulated_job(name, quick)] for name in ALGORITHMS}
    size = QUICK if quick else FULL
    digits = ["--trainable", "elastic", *size["digits"]]
    small = ["--trainable", "small", *size["small"]]
    return {
        "hyperband": ["--algorithm", "hyperband", *digits],
        "asha": ["--algorithm", "asha", *digits],
        "short": ["--algorithm", "grid", "--trainable", "sleep", *size["short"]],
        "launch": launch_job(quick),
        "small": ["--algorithm", "hyperband", *small],
        "small_asha": ["--algorithm", "asha", *small],
    }


def key(job: str) -> str:
    """What is compared of a job's runs."""
    return "launch_seconds" if job == "launch" else "seconds"


def checkout(commit: str, folder: Path) -> None:
    """Write the files of ``commit`` into ``folder``. Raises SystemExit if git does not know the commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        raise SystemExit(f"--before {commit}: {archive.stderr.decode().strip()}; give a commit of this repository")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def described(*commit: str) -> str:
    """The commit's short name; without one, that of the files here, which may differ from their commit ("-dirty")."""
    command = ["git", "describe", "--always", "--exclude=*", *(commit or ("--dirty",))]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def run(folder: Path, devices: str, profile: Path, job: list[str], limit: float) -> Figures:
    """One run of a job in the checkout ``folder``; ``profile``: a file, for emulated devices.

    Raises RuntimeError with the end of the output if it fails, NotEnded if it takes longer than ``limit`` seconds, or
    than the PROCESS_LIMIT_S s after which an earlier commit's script gives up by itself.
    """
    command = [sys.executable, "-c", RUN, devices, str(profile), *job]
    # What a side that is ended leaves behind lies in a directory of its own. The name is short for Unix sockets' sake.
    with tempfile.TemporaryDirectory(prefix="fc-", ignore_cleanup_errors=True) as directory:
        environ = {**os.environ, "TMPDIR": directory}
        output = run_process(command, min(limit, PROCESS_LIMIT_S), cwd=folder, environ=environ).output
    found: Figures = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith('{"seconds"')))
    return found


def pairs(
    name: str, count: int, folders: dict[str, Path], measure: Callable[[Path, float], Figures], limit: SideLimit
) -> dict[str, list[Figures]]:
    """Run a job's sides in ``count`` pairs, or until one does not end. Side -> its runs. ``measure``: runs a side."""
    found: dict[str, list[Figures]] = {side: [] for side in folders}
    for pair in range(count):
        for side in folders if pair % 2 == 0 else reversed(folders):
            done = limit.run(side, partial(measure, folders[side]))
            if done is None:
                return found
            found[side].append(done)
            say(f"{name}, {side}: {done[key(name)]:.2f} s")
    return found


def compared(name: str, of: dict[str, list[Figures]]) -> dict[str, Any]:
    """The figures of a job's pairs, ``of`` by side, as the first paragraphs name them."""
    medians = {side: median(done[key(name)] for done in runs) for side, runs in of.items()}
    return {
        "medians": medians,
        "ratios": medians["before"] / medians["here"],
        "rates": {side: median(done["iterations"] / done["fit_seconds"] for done in runs) for side, runs in of.items()},
        "bound_ratios": median(done["bound_ratio"] for done in of["here"]),
    }


def main() -> None:
    options = parser("FluidTune at an earlier commit beside FluidTune as it is here, in pairs in turn.", limit=True)
    options.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare with")
    options.add_argument(
        "--job", nargs="+", metavar="NAME", help="jobs of --devices (hyperband, short and launch; asha)"
    )
    options.add_argument("--pairs", type=int, default=5, help="runs of each side; medians are compared")
    options.add_argument(
        "--devices", default="cpu:2", type=cpu_or_emulated, help="what both sides run on, cpu:N or emulated:N"
    )
    args = options.parse_args()
    emulated = args.devices.startswith("emulated")
    known = jobs(emulated, args.quick)
    names = args.job or (["asha"] if emulated else ["hyperband", "short", "launch"])
    if unknown := [name for name in names if name not in known]:
        options.error(f"--job {' '.join(unknown)}: on {args.devices} the jobs are {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="fluidtune-commits-") as directory:
        checkout(args.before, Path(directory) / "before")
        commits = {"before": described(args.before), "here": described()}
        folders = {"before": Path(directory) / "before", "here": ROOT}
        profile = Path(directory) / "profile.json"
        scaled(DEFAULT, 0.2 if args.quick else 1.0).save(profile)
        found: dict[str, dict[str, list[Figures]]] = {}
        not_ended: dict[str, dict[str, float]] = {}
        for name in names:

            def measure(folder: Path, seconds: float, job: list[str] = known[name]) -> Figures:
                return run(folder, args.devices, profile, job, seconds)

            limit = SideLimit(args.limit)
            found[name] = pairs(name, 1 if args.quick else args.pairs, folders, measure, limit)
            if limit.not_ended:
                not_ended[name] = limit.not_ended
    by_job = {name: compared(name, of) for name, of in found.items() if name not in not_ended}
    figures = {what: {name: of[what] for name, of in by_job.items()} for what in COMPARED}
    kind = "emulated" if emulated else "real"
    finish(
        result("commits", args.devices, kind, commits=commits, jobs=found, not_ended=not_ended, **figures), args.json
    )


if __name__ == "__main__":
    main()

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
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.algorithms import ALGORITHMS
from benchmarks.common import ROOT, Figures, cpu_or_emulated, finish, parser, result, say
from benchmarks.launch import launch_job
from benchmarks.tune_vs_fluid import FULL, QUICK, emulated_job
from fluidtune.profiles import DEFAULT

#: Runs one job on our side, in the checkout that is the current directory.
RUN = """
import json, sys
from benchmarks.sides import OURS, sides
devices, profile, *job = sys.argv[1:]
print(json.dumps(sides(devices, job, profile)[OURS]()))
"""


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


def run(folder: Path, devices: str, profile: Path, job: list[str]) -> Figures:
    """One run of a job in the checkout ``folder``; ``profile``: a file, for emulated devices.

    Raises RuntimeError with the end of the output if it fails.
    """
    command = [sys.executable, "-c", RUN, devices, str(profile), *job]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"{folder.name}: {' '.join(job)} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        )
    found: Figures = json.loads(done.stdout.splitlines()[-1])
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
    options = parser("FluidTune at an earlier commit beside FluidTune as it is here, in pairs in turn.")
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
        DEFAULT.scaled(0.2 if args.quick else 1.0).save(profile)
        found: dict[str, dict[str, list[Figures]]] = {}
        for name in names:
            found[name] = {side: [] for side in folders}
            for pair in range(1 if args.quick else args.pairs):
                for side in folders if pair % 2 == 0 else reversed(folders):
                    done = run(folders[side], args.devices, profile, known[name])
                    found[name][side].append(done)
                    say(f"{name}, {side}: {done[key(name)]:.2f} s")
    by_job = {name: compared(name, of) for name, of in found.items()}
    figures = {what: {name: of[what] for name, of in by_job.items()} for what in by_job[names[0]]}
    kind = "emulated" if emulated else "real"
    finish(result("commits", args.devices, kind, commits=commits, jobs=found, **figures), args.json)


if __name__ == "__main__":
    main()

"""FluidTune at an earlier commit beside FluidTune as it is here: the same tuning jobs, in pairs in turn.

``python -m benchmarks.commits --before COMMIT --json [--job hyperband|asha|short|launch|small|small_asha ...]
[--pairs N]``. COMMIT is any name that git knows in this repository.

Each side is a copy of its commit's files with that commit's own script (job.py), run by this Python. A pair runs both
sides one after the other; every second pair begins with the other side. ``seconds`` is the time of the whole process,
start-up included, `launch` that from a free place to a trial's first result. ``ratios`` are medians, `before` divided
by `here`: above 1 it has become faster.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.common import ROOT, Figures, cores, finish, parser, result, say
from benchmarks.launch import launch_job
from benchmarks.tune_vs_fluid import FULL, QUICK

#: Runs one job on our side, in the checkout that is the current directory.
RUN = """
import json, sys
from benchmarks.sides import OURS, sides
print(json.dumps(sides(sys.argv[1], sys.argv[2:])[OURS]()))
"""


def jobs(quick: bool) -> dict[str, list[str]]:
    """Name of a job -> its arguments for job.py: those of `tune_vs_fluid` and `launch`."""
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


def run(folder: Path, devices: str, job: list[str]) -> Figures:
    """One run of a job in the checkout ``folder``. Raises RuntimeError with the end of the output if it fails."""
    command = [sys.executable, "-c", RUN, devices, *job]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"{folder.name}: {' '.join(job)} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        )
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = parser("FluidTune at an earlier commit beside FluidTune as it is here, in pairs in turn.")
    options.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare with")
    options.add_argument("--job", nargs="+", choices=jobs(True), default=["hyperband", "short", "launch"])
    options.add_argument("--pairs", type=int, default=5, help="runs of each side; medians are compared")
    options.add_argument("--devices", default="cpu:2", help="what both sides run on, cpu:N")
    args = options.parse_args()
    cores(args.devices)
    with tempfile.TemporaryDirectory(prefix="fluidtune-commits-") as directory:
        checkout(args.before, Path(directory) / "before")
        commits = {"before": described(args.before), "here": described()}
        folders = {"before": Path(directory) / "before", "here": ROOT}
        found: dict[str, dict[str, list[Figures]]] = {}
        for name in args.job:
            found[name] = {side: [] for side in folders}
            for pair in range(1 if args.quick else args.pairs):
                for side in folders if pair % 2 == 0 else reversed(folders):
                    done = run(folders[side], args.devices, jobs(args.quick)[name])
                    found[name][side].append(done)
                    say(f"{name}, {side}: {done[key(name)]:.2f} s")
    medians = {
        name: {side: median(done[key(name)] for done in runs) for side, runs in of.items()}
        for name, of in found.items()
    }
    figures = result(
        "commits",
        args.devices,
        "real",
        commits=commits,
        jobs=found,
        medians=medians,
        ratios={name: sides["before"] / sides["here"] for name, sides in medians.items()},
    )
    finish(figures, args.json)


if __name__ == "__main__":
    main()

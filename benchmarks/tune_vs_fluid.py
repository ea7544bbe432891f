"""How long a whole tuning job takes under FluidTune and under stock Ray Tune.

``python -m benchmarks.tune_vs_fluid --json [--algorithm A] [--trainable elastic|plain|small|short] [--devices D]``.
A is grid, hyperband, syncbohb, bohb, asha or pbt; D is cpu:N or emulated:N.

One stock Tune script (job.py) runs with the same seeds and configurations on three sides in turn (sides.py). Each side
is a whole process with its own Ray cluster. ``seconds`` is the time of the whole process, start-up included;
``fit_seconds`` is the time of ``fit`` in it.

`elastic` and `plain` search over a convolutional network on scikit-learn's digits, `small` over small perceptrons
(small_task.py), whose iterations take hundredths of a second, as many people's first search does. `short` is a grid of
forty trials of one second that train nothing; it shows the cost of FluidTune's start-up and hand-overs. On emulated
devices the task is emulated too: by default one of which a trial fills half a GPU, or that of ``--profile FILE``.
``--seconds`` is the duration of its iteration on one device.

``utilisation`` is the part of the devices' time inside an iteration of some trial. ``--out DIR`` keeps its picture,
with stock Tune's beside ours, and our timeline. ``rates`` are iterations per second by side, because an asynchronous
algorithm does not do the same work in every run. ``bound_ratio`` is the time of a run of ours divided by the least that
any schedule of its work could have had (docs/engine.md, "A bound to judge a run by"); both begin with the event log.

A side that takes longer than ``--limit`` is ended. ``not_ended`` names it, with the seconds that it had taken; all
other figures are those of the other sides (side_limit.py).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.algorithms import ALGORITHMS, means
from benchmarks.common import cores, cpu_or_emulated, finish, parser, ratios, result
from benchmarks.demo import fluid_iterations, stock_iterations
from benchmarks.scaled_profile import scaled
from benchmarks.side_limit import SideLimit, repeat
from benchmarks.sides import OURS, sides
from benchmarks.stock_events import beside_png, events_from_tune_results
from fluidtune.profiles import DEFAULT, Profile
from fluidtune.report import EVENT_LOG_NAME, read_events, summarise, write_report
from fluidtune.report.fold import fold_of
from fluidtune.report.occupancy import held_part, occupancy_of

#: The arguments of job.py by kind of trial. 17 trials are one whole band of HyperBand with at most 9 epochs.
#: 49 trials with at most 27 epochs are one, too.
FULL = {
    "digits": ["--trials", "17", "--epochs", "9"],
    "small": ["--trials", "49", "--epochs", "27"],
    "short": ["--trials", "40"],
}
QUICK = {
    "digits": ["--trials", "3", "--epochs", "3"],
    "small": ["--trials", "5", "--epochs", "3"],
    "short": ["--trials", "4"],
}
#: Algorithm -> (trials, epochs) of the emulated job. 49 trials are one whole band of HyperBand with at most 27 epochs.
#: The dissertation's 81 trials are used for the algorithms with short trials.
EMULATED = dict.fromkeys(("hyperband", "syncbohb"), (49, 27)) | dict.fromkeys(("bohb", "asha"), (81, 81))
EMULATED |= {"grid": (81, 9), "pbt": (27, 27)}


def emulated_job(algorithm: str, quick: bool, trials: int | None = None, epochs: int | None = None) -> list[str]:
    """The arguments of job.py for an emulated job."""
    usual = (5, 3) if quick else EMULATED[algorithm]
    return ["--trainable", "emulated", "--trials", str(trials or usual[0]), "--epochs", str(epochs or usual[1])]


def main() -> None:
    options = parser("A tuning job under FluidTune beside the same job under stock Ray Tune.", repeats=True, limit=True)
    options.add_argument("--algorithm", choices=ALGORITHMS, default="hyperband")
    options.add_argument("--trainable", choices=["elastic", "plain", "small", "short"], default="elastic")
    options.add_argument(
        "--devices", default="cpu:2", type=cpu_or_emulated, help="devices of all sides, cpu:N or emulated:N"
    )
    options.add_argument("--profile", help="file with a profile of emulated devices (a task that fills half a GPU)")
    options.add_argument("--seconds", type=float, help="duration of an emulated iteration on one device (1; quick 0.2)")
    options.add_argument("--trials", type=int, help="trials of an emulated job (81; hyperband and syncbohb 49, pbt 27)")
    options.add_argument(
        "--epochs", type=int, help="limit of iterations of an emulated trial (27; asha, bohb 81, grid 9)"
    )
    options.add_argument("--out", type=Path, help="directory for pictures and results of an emulated job")
    args = options.parse_args()
    size = QUICK if args.quick else FULL
    emulated = args.devices.startswith("emulated")
    if emulated:
        args.trainable = "emulated"
        job = emulated_job(args.algorithm, args.quick, args.trials, args.epochs)
    elif args.trainable == "short":
        args.algorithm = "grid"
        job = ["--trainable", "sleep", *size["short"]]
    else:
        job = ["--trainable", args.trainable, *size["small" if args.trainable == "small" else "digits"]]
    with tempfile.TemporaryDirectory(prefix="fluidtune-profile-") as directory:
        path = None
        if emulated:
            profile = Profile.load(args.profile) if args.profile else DEFAULT
            path = str(Path(directory) / "profile.json")
            scaled(profile, args.seconds or (0.2 if args.quick else 1.0)).save(path)
        keep = str(args.out or Path(directory) / "keep") if emulated else None
        limit = SideLimit(args.limit)
        measured = repeat(sides(args.devices, ["--algorithm", args.algorithm, *job], path, keep), args.repeats, limit)
        limit.require(OURS)
        used = utilisations(Path(keep), measured, cores(args.devices, ("emulated",)), args.out) if keep else {}
    found = ratios(measured, OURS, "seconds")
    figures = result(
        "tune_vs_fluid",
        args.devices,
        "emulated" if emulated else "real",
        algorithm=args.algorithm,
        algorithm_means=means(args.algorithm),
        trainable=args.trainable,
        sides=measured,
        ratio=min(found.values(), default=None),
        ratios=found,
        not_ended=limit.not_ended,
        best={name: side["best"] for name, side in measured.items()},
        bound_ratio=measured[OURS]["bound_ratio"],
        fit_ratios=ratios(measured, OURS, "fit_seconds"),
        rates=rates(measured),
    )
    if emulated:
        figures["profile"] = profile.name
        figures["utilisation"] = used
    finish(figures, args.json)


def rates(sides: Mapping[str, Any]) -> dict[str, float]:
    """Side -> iterations of all trials per second of ``fit``: the median of the side's runs."""
    return {name: median(run["iterations"] / run["fit_seconds"] for run in side["all"]) for name, side in sides.items()}


def utilisations(keep: Path, sides: Iterable[str], devices: int, out: Path | None) -> dict[str, float]:
    """Side -> utilisation in its last run, which is in ``keep``. Pictures go to ``out``."""
    records = {OURS: fluid_iterations(read_events(keep / OURS / EVENT_LOG_NAME))}
    records |= {name: stock_iterations(keep / name) for name in sides if name != OURS}
    events = {
        name: events_from_tune_results(found, devices=devices, run="time in iterations", kind="emulated")
        for name, found in records.items()
    }
    if out is not None:
        shutil.copy(keep / OURS / EVENT_LOG_NAME, out)
        fold = fold_of(out)
        _, utilisation = write_report(fold, summarise(fold), out)
        beside_png(events[OURS], events.get("stock"), utilisation)
    return {name: held_part(occupancy_of(found)) for name, found in events.items()}


if __name__ == "__main__":
    main()

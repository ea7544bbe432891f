"""How long a tuning job takes under FluidTune and under stock Ray Tune.

``python -m benchmarks.tune_vs_fluid --json [--algorithm A] [--trainable elastic|plain|short] [--devices D]``, A one of
grid, hyperband, syncbohb, bohb, asha, pbt; D cpu:N or emulated:N. One stock Tune script (job.py), the same seeds and
configurations, three sides in turn, each a whole process with a Ray of its own: `fluid` (``fluidtune run``), `stock`
(``python``) and `stock_reuse` (the same with Tune's ``reuse_actors``). ``seconds`` is the whole process, start-up
included; ``fit_seconds`` what ``fit`` takes of it. `elastic` and `plain` search over a convolutional network on
scikit-learn's digits; `short` is a grid of forty trials of one second that train nothing, which shows what
FluidTune's own start-up and hand-overs cost. On emulated devices the task is an emulated one, by default one of
which a trial fills half a GPU, or that of ``--profile FILE``; ``--seconds`` is its iteration on one device.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.algorithms import ALGORITHMS, means
from benchmarks.common import cores, finish, parser, ratios, repeat, result
from benchmarks.sides import OURS, sides
from fluidtune.profiles import DEFAULT, Profile

#: By size, what job.py is told. 17 trials are one whole band of HyperBand with at most 9 epochs, 49 with 27.
FULL = {
    "digits": ["--trials", "17", "--epochs", "9"],
    "short": ["--trials", "40"],
    "emulated": ["--trials", "49", "--epochs", "27"],
}
QUICK = {
    "digits": ["--trials", "3", "--epochs", "3"],
    "short": ["--trials", "4"],
    "emulated": ["--trials", "5", "--epochs", "3"],
}


def main() -> None:
    options = parser("A tuning job under FluidTune beside the same job under stock Ray Tune.")
    options.add_argument("--algorithm", choices=ALGORITHMS, default="hyperband")
    options.add_argument("--trainable", choices=["elastic", "plain", "short"], default="elastic")
    options.add_argument("--devices", default="cpu:2", type=_checked, help="what all sides run on, cpu:N or emulated:N")
    options.add_argument("--profile", help="of emulated devices, a file (a task that fills half a GPU)")
    options.add_argument("--seconds", type=float, help="of an emulated iteration on one device (1; quick 0.2)")
    options.add_argument("--trials", type=int, help="of an emulated job (49)")
    options.add_argument("--epochs", type=int, help="most iterations of an emulated trial (27)")
    args = options.parse_args()
    size = QUICK if args.quick else FULL
    emulated = args.devices.startswith("emulated")
    if emulated:
        args.trainable = "emulated"
        job = ["--trainable", "emulated", *size["emulated"]]
        for name in ("trials", "epochs"):
            if getattr(args, name):
                job += [f"--{name}", str(getattr(args, name))]
    elif args.trainable == "short":
        args.algorithm = "grid"
        job = ["--trainable", "sleep", *size["short"]]
    else:
        job = ["--trainable", args.trainable, *size["digits"]]
    with tempfile.TemporaryDirectory(prefix="fluidtune-profile-") as directory:
        path = None
        if emulated:
            profile = Profile.load(args.profile) if args.profile else DEFAULT
            path = str(Path(directory) / "profile.json")
            profile.scaled(args.seconds or (0.2 if args.quick else 1.0)).save(path)
        measured = repeat(sides(args.devices, ["--algorithm", args.algorithm, *job], path), args.repeats)
    found = ratios(measured, OURS, "seconds")
    figures = result(
        "tune_vs_fluid",
        args.devices,
        "emulated" if emulated else "real",
        algorithm=args.algorithm,
        algorithm_means=means(args.algorithm),
        trainable=args.trainable,
        sides=measured,
        ratio=found["stock"],
        ratios=found,
        best={name: side["best"] for name, side in measured.items()},
    )
    if emulated:
        figures["profile"] = profile.name
        figures["fit_ratios"] = ratios(measured, OURS, "fit_seconds")
    finish(figures, args.json)


def _checked(devices: str) -> str:
    cores(devices, ("cpu", "emulated"))
    return devices


if __name__ == "__main__":
    main()

"""How long a tuning job takes under FluidTune and under stock Ray Tune.

``python -m benchmarks.tune_vs_fluid --json [--algorithm grid|hyperband|asha] [--trainable elastic|plain|short]``.
One stock Tune script (job.py), the same seeds and configurations, three sides in turn, each a whole process with
a Ray of its own: `fluid` (``fluidtune run``), `stock` (``python``) and `stock_reuse` (the same with Tune's
``reuse_actors``). ``seconds`` is the whole process, start-up included; ``fit_seconds`` what ``fit`` takes of it.
`elastic` and `plain` search over a convolutional network on scikit-learn's digits; `short` is a grid of forty
trials of one second that train nothing, which shows what FluidTune's own start-up and hand-overs cost.
"""

from __future__ import annotations

from benchmarks.common import cores, finish, parser, ratios, repeat, result
from benchmarks.sides import OURS, sides

#: By size, what job.py is told. 17 trials are one whole band of HyperBand with at most 9 epochs.
FULL = {"digits": ["--trials", "17", "--epochs", "9"], "short": ["--trials", "40"]}
QUICK = {"digits": ["--trials", "3", "--epochs", "3"], "short": ["--trials", "4"]}


def main() -> None:
    options = parser("A tuning job under FluidTune beside the same job under stock Ray Tune.")
    options.add_argument("--algorithm", choices=["grid", "hyperband", "asha"], default="hyperband")
    options.add_argument("--trainable", choices=["elastic", "plain", "short"], default="elastic")
    options.add_argument("--devices", default="cpu:2", type=_checked, help="what all sides run on, cpu:N")
    args = options.parse_args()
    size = QUICK if args.quick else FULL
    if args.trainable == "short":
        args.algorithm = "grid"
        job = ["--trainable", "sleep", *size["short"]]
    else:
        job = ["--trainable", args.trainable, *size["digits"]]
    measured = repeat(sides(args.devices, ["--algorithm", args.algorithm, *job]), args.repeats)
    found = ratios(measured, OURS, "seconds")
    figures = result(
        "tune_vs_fluid",
        args.devices,
        "real",
        algorithm=args.algorithm,
        trainable=args.trainable,
        sides=measured,
        ratio=found["stock"],
        ratios=found,
        best={name: side["best"] for name, side in measured.items()},
    )
    finish(figures, args.json)


def _checked(devices: str) -> str:
    cores(devices)
    return devices


if __name__ == "__main__":
    main()

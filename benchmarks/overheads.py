"""Measured packing and scaling overheads against the true ones, and the cost of searching for the packing limit.

``python -m benchmarks.overheads --json [--devices emulated:N]``. It has two parts.

*Emulated*: a grid under FluidTune on emulated devices whose profile is known. From the event log alone,
`fluidtune.report.measured` reads the first five undisturbed iterations at each width and with each number of
neighbours; alpha and beta are compared with the profile's.

*Twin*, as in the dissertation's 3.6.4.2: a grid with an artificial packing overhead (1.05x, 1.5x, 2x, 10x). A run that
searches for the packing limit is compared with one without packing; ``lost`` is the part by which it is slower.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import cores, finish, parser, result, say
from benchmarks.scaled_profile import scaled
from benchmarks.sides import OURS, sides
from fluidtune.profiles import DEFAULT, Profile
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.report.measured import measure
from fluidtune.twin import forecast, grid

#: The dissertation's 3.6.4.2: 81 trials of 27 iterations on 8 devices, and the artificial packing overheads.
TRIALS, ITERATIONS, DEVICES = 81, 27, 8
OVERHEADS = (1.05, 1.5, 2.0, 10.0)
#: Iterations used at each width and with each number of neighbours. A trial's first few, as in a real job.
MOST = 5
#: Widths at which beta is compared.
WIDTHS = (2, 4, 8)


def measured(devices: str, trials: int, epochs: int, seconds: float) -> dict[str, Any]:
    """Run a grid on emulated devices and read its log."""
    true = scaled(DEFAULT, seconds)
    with tempfile.TemporaryDirectory(prefix="fluidtune-overheads-") as keep:
        path = str(Path(keep) / "profile.json")
        true.save(path)
        job = ["--trainable", "emulated", "--algorithm", "grid", "--trials", str(trials), "--epochs", str(epochs)]
        sides(devices, job, path, keep)[OURS]()
        found = measure(read_events(Path(keep) / OURS / EVENT_LOG_NAME), most=MOST).profile
    compared: dict[str, Any] = {}
    if 2 in found.packed:
        compared["alpha"] = {"true": alpha(true), "measured": alpha(found)}
    for width in WIDTHS:
        if str(width) in found.seconds:
            ratio = {"true": overhead(true, width), "measured": overhead(found, width)}
            compared[f"beta at {width}"] = ratio
    errors = [abs(one["measured"] / one["true"] - 1) for one in compared.values()]
    return {"compared": compared, "worst_error": max(errors, default=None)}


def alpha(profile: Profile) -> float:
    """alpha of eq. 3.2, of two trials on one device; at least 1."""
    return max(1.0, profile.packed[2] / profile.seconds["1"])


def overhead(profile: Profile, width: int) -> float:
    """beta of eq. 3.2, computed from the time at one width."""
    return float((profile.seconds[str(width)] / profile.seconds["1"] * width) ** (1 / (width - 1)))


def artificial(factor: float) -> dict[str, float]:
    """A grid on the twin in which an iteration of p packed trials takes ``factor`` * p / 2 times one alone."""
    packed = {p: factor * p / 2 for p in (2, 3, 4)}
    profile = Profile(f"packed-{factor:g}x", {"1": 1.0, "2": 0.55, "4": 0.32, "8": 0.22}, packed, memory=0.2)
    found = forecast(grid(TRIALS, ITERATIONS, profile), DEVICES)
    without = forecast(grid(TRIALS, ITERATIONS, profile, max_packing=1), DEVICES)
    return {
        "packing": found.packing,
        "seconds": found.makespan,
        "seconds_unpacked": without.makespan,
        "lost": max(0.0, found.makespan / without.makespan - 1),
    }


def main() -> None:
    options = parser("Overheads measured while training against true ones.")
    options.add_argument("--devices", default="emulated:8", help="emulated:N")
    args = options.parse_args()
    cores(args.devices, ("emulated",))
    trials, epochs, seconds = (5, 6, 0.3) if args.quick else (17, 18, 1.0)
    emulated = measured(args.devices, trials, epochs, seconds)
    say(f"measured on {args.devices}: {emulated}")
    overheads = {f"{factor:g}x": artificial(factor) for factor in OVERHEADS}
    figures = result(
        "overheads",
        args.devices,
        "emulated",
        **emulated,
        artificial=overheads,
        artificial_kind="twin",
        lost_by_measuring=max(one["lost"] for one in overheads.values()),
    )
    finish(figures, args.json)


if __name__ == "__main__":
    main()

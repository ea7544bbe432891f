"""GPUs of two models in one job, on the twin: like devices first, beside planning as if all devices were alike.

``python -m benchmarks.two_models --json [--seeds N] [--slowness 2 3] [--quick]``. No Ray cluster is started. Eight
devices of one node: on every other one an iteration takes ``slowness`` times as long. The sides run the same elastic
trials, whose iterations differ by up to four times, in batches of 4, 12 and 24. ``like_first`` is FluidTune: workers
tell of which model a device is, and a trial that grows gets devices of its own model before others. ``as_if_alike`` is
the same engine without being told. ``ratio`` is the seconds of ``as_if_alike`` divided by those of ``like_first``, the
mean over all batches and seeds. ``rows`` has it for each case: by the profile (`streams`), the slowness and the size of
the batch, with the least and the largest of all seeds. ``alike`` is the largest difference in seconds between the sides
where all devices are of one model: it must be 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.streams import POOR, SCALES, TWO_CORES
from fluidtune.engine import messages as m
from fluidtune.profiles import Profile
from fluidtune.twin import RecordedJob, RecordedTrial, Stage, Twin

DEVICES = 8
#: Fewer trials than devices, a few more, and many more.
BATCHES = (4, 12, 24)
ITERATIONS = 40
#: Two generations of GPUs, and a large one beside a small one.
SLOWNESS = (2.0, 3.0)


@dataclass(frozen=True)
class Model:
    """A device's model. An iteration takes ``slowness`` times what the profile says.

    ``name``: what the engine hears when the device's first worker is there; None: it hears nothing.
    """

    name: str | None = None
    slowness: float = 1.0


class MixedTwin(Twin):
    """The twin with a model of each device. The workers of a trial wait for the one on the slowest device."""

    def __init__(self, work: RecordedJob, models: Sequence[Model]):
        super().__init__(work, len(models))
        self._models = models

    def _worker_started(self, device: int, then: Callable[[], None]) -> None:
        name = self._models[device].name
        if name is not None:
            self._events.append(m.ModelFound(device, name))
        super()._worker_started(device, then)

    def _seconds(self, run: Any) -> float:
        return super()._seconds(run) * max(self._models[device].slowness for device in run.devices)


def job(profile: Profile, trials: int, seed: int) -> RecordedJob:
    """A batch of elastic trials whose iterations take one to four times as long as those of ``profile``."""
    rng = random.Random(seed)
    stage = Stage("all", ITERATIONS, float(ITERATIONS))
    listed = tuple(RecordedTrial(f"trial{at}", (stage,), 4 ** rng.random()) for at in range(trials))
    return RecordedJob(listed, profile, {"all": True}, costs=TWO_CORES, max_packing=1)


def seconds(work: RecordedJob, slowness: float, told: bool) -> float:
    """The makespan on devices of which every other one is slow."""
    names = ("fast", "slow" if slowness > 1 else "fast")
    models = [Model(names[at % 2] if told else None, slowness if at % 2 else 1.0) for at in range(DEVICES)]
    return MixedTwin(work, models).run()


def compared(profile: Profile, slowness: float, trials: int, seeds: int) -> dict[str, Any]:
    """Mean seconds of both sides, and their ratios' mean, least and largest."""
    jobs = [job(profile, trials, seed) for seed in range(seeds)]
    like = [seconds(each, slowness, True) for each in jobs]
    alike = [seconds(each, slowness, False) for each in jobs]
    each = [other / ours for other, ours in zip(alike, like, strict=True)]
    return {
        "profile": profile.name,
        "slowness": slowness,
        "trials": trials,
        "like_first": fmean(like),
        "as_if_alike": fmean(alike),
        "ratio": fmean(each),
        "least": min(each),
        "largest": max(each),
    }


def found_for(slownesses: Sequence[float], seeds: int) -> dict[str, Any]:
    """The benchmark's figures."""
    rows = []
    for profile, slowness, size in product((SCALES, POOR), slownesses, BATCHES):
        rows.append(row := compared(profile, slowness, size, seeds))
        say(
            f"{profile.name}, {slowness:g} times slower, {size} trials:"
            f" {row['ratio']:.3f} ({row['least']:.3f} to {row['largest']:.3f})"
        )
    sides = {name: {"seconds": fmean(row[name] for row in rows)} for name in ("like_first", "as_if_alike")}
    same = [job(SCALES, size, seed) for size, seed in product(BATCHES, range(seeds))]
    apart = max(abs(seconds(each, 1.0, True) - seconds(each, 1.0, False)) for each in same)
    ratio = fmean(row["ratio"] for row in rows)
    return {"sides": sides, "ratio": ratio, "rows": rows, "alike": apart, "seeds": seeds}


def main() -> None:
    options = parser("GPUs of two models in one job, on the twin.")
    options.add_argument("--seeds", type=int, help="batches of each size (20; quick 3)")
    options.add_argument("--slowness", type=float, nargs="*", help="how many times as long the slow ones take (2, 3)")
    args = options.parse_args()
    figures = found_for(args.slowness or SLOWNESS, args.seeds or (3 if args.quick else 20))
    finish(result("two_models", f"twin:{DEVICES}", "twin", **figures), args.json)


if __name__ == "__main__":
    main()

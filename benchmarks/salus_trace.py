"""The 100-job trace of benchmarks.lanes: jobs drawn from recorded ones, or from seeded ones like them.

Published figures that are used here: Salus' dissertation has 100 jobs with 303.4 min of work (table 2.1), peaks from
0.7 to 13.8 GB, and persistent memory from 110.9 MB (googlenet_25, peak 756 MB) to 822.2 MB (resnet152_75, peak 12,726
MB). FIFO's 95 % JCT is 52 min below its makespan there, so jobs arrive over about that time. Sizes "followed one
found in a production cluster": here they are log-normal with the spread of the single-GPU jobs of the Philly trace
(sigma 1.97).

Assumptions: P grows with the peak on a line through the two published points. Every iteration keeps 1/1.07 of the
device busy, because packing 300 resnet50_50 gained 1.07 (section 2.5.2).
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared_device.twin import TwinJob
from salus_share import Need

MB = 2**20
#: The memory of a P100, bytes: the dissertation's GPU.
CAPACITY = 16_000_000_000
#: Seconds of work, seconds over which jobs arrive, spread of sizes, and the part of the device that an iteration keeps
#: busy. The module's docstring has the sources.
WORK_S, ARRIVALS_S, SIGMA, COMPUTE = 303.4 * 60, 52.0 * 60, 1.97, 1 / 1.07


@dataclass(frozen=True)
class Kind:
    """A model with a batch size: its peak memory in MB, and the seconds of an iteration alone."""

    name: str
    peak_mb: float
    seconds: float

    @property
    def need(self) -> Need:
        """P by the line through the published points. E is the rest of the peak."""
        slope = (822.2 - 110.9) / (12725.7 - 756.1)
        persistent = min(max(110.9 + slope * (self.peak_mb - 756.1), 10.0), self.peak_mb / 2)
        return Need(int(persistent * MB), int((self.peak_mb - persistent) * MB), COMPUTE)


def rows(path: Path) -> list[tuple[Kind, int]]:
    """Recorded jobs, each its kind and iterations: a CSV with job, runtime_s, peak_memory_mb, iterations.

    That is what Salus' workloads.csv has. Raises ValueError for a file without them.
    """
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                name, iterations = row["job"].rsplit("_", 1)[0], int(row["iterations"])
                kind = Kind(name, float(row["peak_memory_mb"]), float(row["runtime_s"]) / iterations)
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise ValueError(f"{path} has a row {row}: expected job,runtime_s,peak_memory_mb,iterations") from error
            found.append((kind, iterations))
    if not found:
        raise ValueError(f"{path} has no rows; expected job,runtime_s,peak_memory_mb,iterations")
    return found


def recorded(path: Path) -> list[Kind]:
    """The kinds of recorded jobs, each by its longest run, in which the start weighs least."""
    longest = {kind.name: kind for kind, _ in sorted(rows(path), key=lambda row: row[1])}
    return list(longest.values())


def as_recorded(path: Path, seed: int, coarse_s: float = 0.0) -> list[TwinJob]:
    """Every recorded job once, as long as it ran; the jobs arrive in random order."""
    draw = random.Random(f"recorded {seed}")
    found = enumerate(rows(path))
    made = [_job(f"{i}-{kind.name}", draw.uniform(0, ARRIVALS_S), kind, n, coarse_s) for i, (kind, n) in found]
    return sorted(made, key=lambda job: job.arrival)


def generated(seed: int, count: int = 45) -> list[Kind]:
    """As many kinds as the dissertation has, peaks and iteration times log-uniform over its ranges."""
    draw = random.Random(f"kinds {seed}")

    def between(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    return [Kind(f"kind{index}", between(690, 13_100), between(0.02, 1.2)) for index in range(count)]


def trace(kinds: list[Kind], seed: int, jobs: int = 100, coarse_s: float = 0.0) -> list[TwinJob]:
    """The jobs by arrival. ``coarse_s``: iterations are merged until they last that many seconds."""
    draw = random.Random(f"jobs {seed}")
    sizes = [math.exp(draw.gauss(0, SIGMA)) for _ in range(jobs)]
    scale = WORK_S / 100 * jobs / sum(sizes)
    made = []
    for index, size in enumerate(sizes):
        kind = draw.choice(kinds)
        iterations = max(1, round(size * scale / kind.seconds))
        arrival = draw.uniform(0, ARRIVALS_S * jobs / 100)
        made.append(_job(f"{index}-{kind.name}", arrival, kind, iterations, coarse_s))
    return sorted(made, key=lambda job: job.arrival)


def _job(name: str, arrival: float, kind: Kind, iterations: int, coarse_s: float) -> TwinJob:
    merged = max(1, min(iterations, round(coarse_s / kind.seconds)))
    return TwinJob(name, arrival, kind.need, max(1, iterations // merged), kind.seconds * merged)

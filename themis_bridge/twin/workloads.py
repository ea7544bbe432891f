"""Workloads for the twin: seeded ones by the paper's published distributions, and recorded traces.

Published (sections 2.2 and 6.1): 10 % of the apps have one job, the others 10 to 100 with a median of 75; the median
app takes 11.5 GPU days; 10 % vision, 60 % language, 30 % speech; 256 GPUs on machines of 8, 4 and 1.
The readers take a path; nothing recorded is part of this package.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobInfo
from themis_bridge.locality import GUESSES, Gpu
from themis_bridge.twin.apps import Spec

#: Machines of the paper's simulator: (machines, slots, GPUs of a slot); as published 168 GPUs, brought to its 256
#: by more machines of the first sort.
PAPER_256 = ((27, 4, 2), (6, 4, 1), (16, 1, 1))
#: Its testbed of 64 GPUs.
TESTBED_64 = ((12, 4, 1), (8, 2, 1))
#: S over the network of models that are bound by it: VGG16 on four GPUs loses 103.6 / 80.4 across two machines
#: (table 1), and more across racks; Inception-v3, 242 / 243, loses nothing.
NETWORK_BOUND = {"slot": 1.0, "machine": 1.0, "rack": 103.6 / 80.4, "cluster": (103.6 / 80.4) ** 2}
COMPUTE_BOUND = {"slot": 1.0, "machine": 1.0, "rack": 1.0, "cluster": 1.0}


def machines(layout: tuple[tuple[int, int, int], ...], racks: int = 4) -> list[Gpu]:
    """GPUs of a layout; machines are dealt to racks in turn."""
    gpus, number = [], 0
    for count, slots, size in layout:
        for _ in range(count):
            name = f"m{number:04}"
            for slot in range(slots):
                gpus += [Gpu(f"{name}s{slot}g{i}", name, f"r{number % racks}", f"s{slot}") for i in range(size)]
            number += 1
    return gpus


def tuning_apps(
    count: int,
    seed: int,
    *,
    days: float = 11.5,
    between_s: float = 3600.0,
    network_bound: float = 0.5,
) -> list[Spec]:
    """Successive-halving apps by the paper's distributions (its workload 2).

    Args:
        days: median GPU days of an app.
        between_s: mean seconds between arrivals; they come in bursts (figure 1), two in three shortly after another.
        network_bound: share of the apps that are bound by the network.
    """
    rng = random.Random(seed)
    specs, now = [], 0.0
    for number in range(count):
        if number:
            burst = rng.random() < 2 / 3
            now += rng.expovariate(1 / (between_s * (0.25 if burst else 2.5)))
        jobs = 1 if rng.random() < 0.1 else min(100, max(10, round(rng.gauss(75, 20))))
        width = rng.choice([1, 2, 4, 4]) if jobs > 1 else rng.choice([4, 8])
        # Many are ten times shorter or longer than the median one (figure 3): one in ten at either end.
        budget = days * 86400 * min(15.0, max(1 / 15, rng.lognormvariate(0, 1.8)))
        rungs = max(1, round(math.log2(jobs)))
        phases = []
        for rung in range(rungs):
            # Half the jobs, each twice as wide, with as much work in all (section 4.3.2).
            alive = max(1, jobs >> rung)
            seconds = budget / rungs / alive / 100
            phases.append([JobInfo(100, seconds * rng.uniform(0.8, 1.25), width << rung) for _ in range(alive)])
        links = NETWORK_BOUND if rng.random() < network_bound else COMPUTE_BOUND
        specs.append(Spec(f"app{number:03}", now, phases, dict(links)))
    return specs


def read_jobs(path: str | Path) -> list[Spec]:
    """A recorded trace of single jobs in the format of Gavel and Shockwave: twelve fields between tabs.

    The seventh field is the GPUs that a job asks for, the eleventh its seconds on them, the twelfth its arrival.

    Raises:
        ThemisError: a line that is not of that format.
    """
    specs = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        fields = line.split("\t")
        try:
            width, seconds, arrives = int(fields[6]), float(fields[-2]), float(fields[-1])
        except (IndexError, ValueError):
            raise ThemisError(f"{path}, line {number}: not a job of twelve fields between tabs: {line[:80]!r}")
        job = JobInfo(1000, seconds * width / 1000, width)
        specs.append(Spec(f"job{number:03}", arrives, [[job]], dict(GUESSES)))
    if not specs:
        raise ThemisError(f"{path}: no job in it")
    return specs

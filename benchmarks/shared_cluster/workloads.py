"""Workloads for the twin: seeded ones by the distributions that the paper has published, and recorded traces.

Published (sections 2.2 and 6.1): 10 % of the apps have one job, the others 10 to 100 jobs with a median of 75; the
median app takes 11.5 GPU days; 10 % are vision, 60 % language, 30 % speech models. A recorded trace is read from a
file; none is part of this package.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from benchmarks.shared_cluster.apps import Spec
from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobInfo
from themis_bridge.locality import GUESSES, Gpu

#: The paper's testbed of 64 GPUs on 20 machines (section 6.1): (machines, slots of each, GPUs of each slot).
TESTBED_64 = ((12, 4, 1), (8, 2, 1))
#: S of a model that is bound by the network, across machines and racks. Source: table 1, VGG16 on four GPUs is
#: 103.6 / 80.4 times slower on two machines than on one. Judgement: across racks it loses the same factor again.
NETWORK_BOUND = (103.6 / 80.4, (103.6 / 80.4) ** 2)
#: The same of a model that is not bound by the network. Source: table 1, Inception-v3 (242 and 243 images/s).
COMPUTE_BOUND = (1.0, 1.0)


def machines(layout: tuple[tuple[int, int, int], ...], racks: int = 4) -> list[Gpu]:
    """The GPUs of a layout, see `TESTBED_64`; machine number n is in rack n modulo ``racks``."""
    gpus, number = [], 0
    for count, slots, size in layout:
        for _ in range(count):
            name = f"m{number:04}"
            for slot in range(slots):
                gpus += [Gpu(f"{name}s{slot}g{i}", name, f"r{number % racks}") for i in range(size)]
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
        count: number of apps.
        seed: of all random draws.
        days: median GPU days of an app; 11.5 in the paper.
        between_s: mean seconds between arrivals. They come in bursts (figure 1): two of three apps arrive a quarter of
            this mean after another app, on average (judgement).
        network_bound: fraction of the apps that are bound by the network.
    """
    rng = random.Random(seed)
    specs, now = [], 0.0
    for number in range(count):
        if number:
            burst = rng.random() < 2 / 3
            now += rng.expovariate(1 / (between_s * (0.25 if burst else 2.5)))
        jobs = 1 if rng.random() < 0.1 else min(100, max(10, round(rng.gauss(75, 20))))
        width = rng.choice([1, 2, 4, 4]) if jobs > 1 else rng.choice([4, 8])
        # One app in ten is ten times longer than the median, and one in ten is ten times shorter (figure 3).
        budget = days * 86400 * min(15.0, max(1 / 15, rng.lognormvariate(0, 1.8)))
        rungs = max(1, round(math.log2(jobs)))
        phases = []
        for rung in range(rungs):
            # Each rung has half the jobs of the one before, each twice as wide, and the same total work (section
            # 4.3.2).
            alive = max(1, jobs >> rung)
            seconds = budget / rungs / alive / 100
            phases.append([JobInfo(100, seconds * rng.uniform(0.8, 1.25), width << rung) for _ in range(alive)])
        links = NETWORK_BOUND if rng.random() < network_bound else COMPUTE_BOUND
        specs.append(Spec(f"app{number:03}", now, phases, links))
    return specs


def single_job(number: int, arrives: float, seconds: float, width: int, links: tuple[float, float] = GUESSES) -> Spec:
    """An app of one job that takes ``seconds`` on ``width`` GPUs. ``links``: as of `Spec`."""
    return Spec(f"job{number:03}", arrives, [[JobInfo(1000, seconds * width / 1000, width)]], links)


def read_jobs(path: str | Path) -> list[Spec]:
    """Read a recorded trace of single jobs in the format of Gavel and Shockwave: twelve fields separated by tabs.

    The seventh field is the number of GPUs that the job asks for, the eleventh its seconds on them, the twelfth its
    arrival in seconds.

    Raises:
        ThemisError: a line is not in this format, or the file has no job.
    """
    specs = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        fields = line.split("\t")
        try:
            width, seconds, arrives = int(fields[6]), float(fields[-2]), float(fields[-1])
        except (IndexError, ValueError):
            raise ThemisError(
                f"{path}, line {number}: expected a job of twelve fields separated by tabs, found {line[:80]!r}"
            )
        specs.append(single_job(number, arrives, seconds, width))
    if not specs:
        raise ThemisError(f"{path}: the file has no job")
    return specs


def single_jobs(count: int, seed: int, *, hours: float, between_s: float) -> list[Spec]:
    """Single jobs, narrow and wide. Judgement for all that is drawn: as wide and as varied as recorded traces are.

    Args:
        count: number of jobs.
        seed: of all random draws.
        hours: median hours of a job on all GPUs that it can use.
        between_s: mean seconds between arrivals.
    """
    rng = random.Random(seed)
    specs, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(1 / between_s) if number else 0.0
        width = rng.choice([1, 1, 1, 2, 4, 8])
        seconds = hours * 3600 * min(8.0, max(1 / 8, rng.lognormvariate(0, 1.0)))
        links = NETWORK_BOUND if rng.random() < 0.5 else COMPUTE_BOUND
        specs.append(single_job(number, now, seconds, width, links))
    return specs

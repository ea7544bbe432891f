"""Two models on two GPUs as queues M/D/1: a GPU for each, or both in a pipeline (AlpaServe, section 3.4).

The paper's number in the queue is a waiting time divided by the service time; its waiting times are right. ``rate``:
requests per second of both models, ``share``: the first model's part of them, times in seconds.
"""

from __future__ import annotations

import math


def mean_latency(rate: float, latency: float, bottleneck: float) -> float:
    """Of a Poisson stream through a pipeline whose largest stage takes ``bottleneck``.

    W = D_s + r D_m^2 / (2 (1 - r D_m)). Infinite if the largest stage is saturated.
    """
    load = rate * bottleneck
    return latency + load * bottleneck / (2 * (1 - load)) if load < 1 else math.inf


def replicated(rate: float, latency: float, share: float = 0.5) -> float:
    """Mean latency, the models on a GPU each."""
    return sum(part * mean_latency(part * rate, latency, latency) for part in (share, 1 - share))


def most_slowdown(load: float) -> tuple[float, float]:
    """What the pipeline may lose and still be no slower, at ``load`` = rate * latency and equal shares.

    First, by how much all stages may be slower; second, by how much the largest one may be, if the sum stays.
    """
    k = (4 - load) / (4 - 2 * load)
    middle = 8 + 4 * k * load
    every = (middle - math.sqrt(middle**2 - 96 * load * k)) / (6 * load)
    largest = (math.sqrt(load**2 - 4 * load + 8) - load) / (2 - load)
    return every, largest

"""Requests by seed, at random or in bursts. All times are seconds, all rates requests per second."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping

from symphony_serve.errors import ServeError
from symphony_serve.messages import Request


def poisson(rates: Mapping[str, float], slos: Mapping[str, float], seed: int) -> Iterator[Request]:
    """Requests for ever, in the order of their arrival; ids from 0. Those of a model are a Poisson process.

    rates: by model, finite. slos: by model, the seconds from a request's arrival to its deadline.
    """
    rng = random.Random(seed)
    models = [model for model, rate in rates.items() if rate > 0]
    total = sum(rates.values())
    if not models:
        return
    shares, budgets = [rates[model] for model in models], [slos[model] for model in models]
    now, number = 0.0, 0
    while True:
        for place in rng.choices(range(len(models)), shares, k=1000):
            now += rng.expovariate(total)
            yield Request(number, models[place], now, now + budgets[place])
            number += 1


def arrivals(rates: Mapping[str, float], slos: Mapping[str, float], seed: int, shape: float) -> Iterator[Request]:
    """As `poisson`, but the gaps between the requests of a model are drawn from a Gamma distribution of this shape.

    Their mean is 1/rate: 1 is a Poisson process, less is burstier. Raises ServeError for a shape that is not positive.
    """
    if not 0 < shape < math.inf:
        raise ServeError(f"the shape of the gaps is {shape}, expected a positive number; 1 is a Poisson process")
    return poisson(rates, slos, seed) if shape == 1 else _gamma(rates, slos, seed, shape)


def _gamma(rates: Mapping[str, float], slos: Mapping[str, float], seed: int, shape: float) -> Iterator[Request]:
    rng = random.Random(seed)
    gaps = {model: 1 / (rate * shape) for model, rate in rates.items() if rate > 0}
    coming = [(rng.gammavariate(shape, scale) * rng.random(), model) for model, scale in gaps.items()]
    heapq.heapify(coming)
    number = 0
    while coming:
        now, model = coming[0]
        yield Request(number, model, now, now + slos[model])
        number += 1
        heapq.heapreplace(coming, (now + rng.gammavariate(shape, gaps[model]), model))

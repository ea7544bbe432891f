"""Requests by seed: when they come and for which model. All times are seconds, all rates requests per second."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence

from symphony_serve.errors import ServeError
from symphony_serve.messages import Request


def arrivals(rates: Mapping[str, float], slos: Mapping[str, float], seed: int, shape: float = 1.0) -> Iterator[Request]:
    """Requests for ever, in the order of their arrival; ids from 0.

    rates: by model. slos: by model, the seconds from a request's arrival to its deadline. shape: the gaps between the
    requests of a model are drawn from a Gamma distribution of this shape whose mean is 1/rate: 1 is a Poisson process,
    less is burstier. Raises ServeError for a rate that is negative or not finite, and for a shape that is not positive.
    """
    if not 0 < shape < math.inf:
        raise ServeError(f"the shape of the gaps is {shape}, expected a positive number; 1 is a Poisson process")
    for model, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise ServeError(f"the rate of model {model} is {rate}, expected requests per second of 0 or more")
    return _poisson(rates, slos, seed) if shape == 1 else _gamma(rates, slos, seed, shape)


def _poisson(rates: Mapping[str, float], slos: Mapping[str, float], seed: int) -> Iterator[Request]:
    """One Poisson process of all models together, each request of which is for one of them."""
    rng = random.Random(seed)
    models = [model for model, rate in rates.items() if rate > 0]
    total = sum(rates.values())
    if not models:
        return
    chosen = rng.choices
    shares, budgets = [rates[model] for model in models], [slos[model] for model in models]
    places = range(len(models))
    now, number = 0.0, 0
    while True:
        for place in chosen(places, shares, k=1000):
            now += rng.expovariate(total)
            yield Request(number, models[place], now, now + budgets[place])
            number += 1


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


def equal(models: Sequence[str]) -> dict[str, float]:
    """The same share of the load for each model."""
    return dict.fromkeys(models, 1 / len(models))

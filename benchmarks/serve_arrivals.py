"""Requests by seed that come in bursts. All times are seconds, all rates requests per second."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping

from symphony_serve.errors import ServeError
from symphony_serve.messages import Request
from symphony_serve.twin import poisson


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

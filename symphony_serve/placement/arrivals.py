"""When requests of several models arrive, drawn from their rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from symphony_serve.placement.simulator import Requests

#: Requests of a search. Judgement: by chance alone their attainment is off by .002 where it is .9.
SAMPLE = 30_000


def gamma_arrivals(rate: float, cv: float, seconds: float, seed: int) -> np.ndarray:
    """Arrivals from 0 to before ``seconds``, at ``rate`` a second.

    The gaps have a Gamma distribution with ``cv``, the standard deviation divided by the mean; 1 is Poisson. They are
    drawn as in AlpaServe's code (alpa-projects/mms), so that its published workloads come out.
    """
    if rate <= 0:
        return np.empty(0)
    if cv == 0:
        return np.arange(np.ceil(rate * seconds)) / rate
    random = np.random.RandomState(seed)
    size = max(int(1.2 * rate * seconds), 1)
    parts, last = [], 0.0
    while last < seconds:
        gaps = random.gamma(1 / cv**2, cv**2 / rate, size=size)
        parts.append(np.cumsum(np.append(last, gaps))[1:])
        last = parts[-1][-1]
    ends = np.concatenate(parts)
    return ends[ends < seconds]


def merged(arrivals: Sequence[np.ndarray]) -> Requests:
    """The requests of all models, by their arrivals in seconds."""
    times = np.concatenate(arrivals)
    models = np.repeat(np.arange(len(arrivals)), [len(one) for one in arrivals])
    order = np.argsort(times, kind="stable")
    return Requests(times[order], models[order])


def drawn(rates: Sequence[float], cvs: Sequence[float], count: int) -> Requests:
    """About ``count`` requests of models with these rates in requests/s, of which the gaps have these CVs."""
    seconds = count / sum(rates)
    pairs = zip(rates, cvs, strict=True)
    return merged([gamma_arrivals(rate, cv, seconds, number) for number, (rate, cv) in enumerate(pairs)])

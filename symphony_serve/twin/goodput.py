"""The highest rate of requests that a server bears. Rates are requests per second."""

from __future__ import annotations

from collections.abc import Callable

from symphony_serve.twin.simulation import Outcome

#: A server bears a rate if of each model at most this part of the requests is refused or late (section 5.1).
BAD_RATE = 0.01


def goodput(run: Callable[[float], Outcome], guess: float, precision: float = 0.005) -> float:
    """The highest rate at which no model's bad rate is above `BAD_RATE`, to ``precision`` of it.

    ``run``: simulates a total rate. ``guess``: where the search begins. It doubles or halves until it has a rate that
    the server bears and one that it does not bear, and then halves the gap between them.
    """
    low, high, rate = 0.0, 0.0, guess
    while not high or high - low > precision * high:
        if run(rate).worst_bad_rate <= BAD_RATE:
            low = rate
        else:
            high = rate
        rate = 2 * low if not high else (low + high) / 2
        if high and high < guess / 2**20:
            return 0.0
    return low

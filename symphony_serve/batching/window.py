"""Batches of at least a target size: the heads that would keep a batch smaller are given up (Nexus' sliding window).

This is the default of Symphony's public code. The paper calls it and `benchmarks.rival_servers.fifo` equally good;
they are not (docs/serving.md has the figures).
"""

from __future__ import annotations

import math

from symphony_serve.batching.deadline_order import DeadlineOrder
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.messages import Request
from symphony_serve.profiles import Profile


class Window(DeadlineOrder):
    """A run of the earliest deadlines that has the target size, where so many requests can still be served."""

    def __init__(self, profile: Profile, slo: float, delays: Delays):
        self._target = 1
        #: Place in the queue from which on all requests fit into one batch. It never goes back while the profile is the
        #: same and no request is removed: a later start or more requests only move it on.
        self._fits = 0
        self._rate: float | None = None
        super().__init__(profile, slo, delays)

    def set_profile(self, profile: Profile) -> None:
        super().set_profile(profile)
        self._fits = 0
        self._find_target()

    def set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            self._find_target()

    def _find_target(self) -> None:
        budget = self._slo - self._delays.control - self._delays.response
        self._target = target_batch(self._profile, self._rate, budget, self._delays)
        self._size = 0

    @property
    def target(self) -> int:
        """b*, the size below which a batch is only run if no larger one can be."""
        return self._target

    def remove(self, request_id: int) -> Request | None:
        self._fits = 0
        return super().remove(request_id)

    def _cut(self) -> None:
        self._fits = max(0, self._fits - self._head)
        super()._cut()

    def _gather(self, start: float) -> int:
        queue, table = self._queue, self._table
        count = len(queue)
        fits = max(self._fits, self._head, count - (len(table) - 2))
        while fits < count and start > queue[fits][0] - table[count - fits]:
            fits += 1
        self._fits = fits
        size = min(self._target, count - fits)
        if size == 0:
            while self._head < count:
                self._give_up_head(start)
            return 0
        needed = table[size]
        while start > queue[self._head][0] - needed:
            self._give_up_head(start)
        return self._largest(start, size)


def target_batch(profile: Profile, rate: float | None, budget: float, delays: Delays = NO_DELAYS) -> int:
    """b*, the batch size that a model needs at ``rate`` requests per second.

    ``n = rate*l(b)/b`` GPUs serve batches of b back to back. Staggered, they let a request wait l(b)/n for the start of
    its batch, which then takes l(b): equation 1, ``l(b)*(1 + 1/n) <= budget``, with n of at least 1. b* is the last
    size before the first that breaks it. If its n is at most 1, one GPU is enough and a batch waits until its requests
    have come: b* is the largest b with ``l(b) + b/rate <= budget``. Fetching b inputs takes ``delays.data*b`` of the
    budget. ``rate`` None or 0, nobody knows it: the largest b with ``l(b) <= budget/2``. Source: the public code's
    batch size estimator.
    """
    table, data = profile.table, delays.data
    if not rate:
        return max(1, profile.largest(budget / 2))
    target = 1
    for size in range(1, profile.max_batch + 1):
        gpus = rate * table[size] / size
        if table[size] * (1 + 1 / max(1.0, gpus)) > budget - data * size:
            break
        target = size
    if rate * table[target] / target > 1 or math.isinf(rate):
        return target
    fitting = (size for size in range(profile.max_batch, 0, -1) if table[size] + size / rate + data * size <= budget)
    return next(fitting, 1)

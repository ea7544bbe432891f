"""Which model gets which GPU, and when (algorithm 1). It sees one offer of each model, and no request.

A model's offer waits until its batch may start. If a GPU is free then, the model gets it; else the model is *ready* and
waits for the next GPU. A GPU that becomes free goes to the ready model whose batch must start soonest. Ties: the
earlier deadline, then the model's name. What happens at one moment happens in this order: GPUs become free, batches may
start, offers expire.

All is found in O(log models + log GPUs): no step looks at all models or all GPUs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from symphony_serve.gpu_table import Gpu, GpuTable

#: A heap is built anew without its outdated entries when it has this many times the entries that there are models. Each
#: arrival makes one entry outdated, and so an arrival still costs O(log models) on average.
OUTDATED = 64


class Offer(NamedTuple):
    """The batch that a model could run next, as the matching sees it.

    size: its requests. earliest, latest: it may start on a GPU between these moments; after ``latest`` the offer is
        void. delay: how long before its start it must be sent. deadline: its earliest deadline.
    seconds: on the GPU. overlap: the last of them, in which the GPU can run the next batch.
    """

    size: int
    earliest: float
    latest: float
    delay: float
    deadline: float
    seconds: float
    overlap: float = 0.0


class Grant(NamedTuple):
    """The model gets this GPU for its offer of ``size`` requests. It sends a batch or not, and makes another offer."""

    model: str
    gpu: Gpu
    size: int


class Expired(NamedTuple):
    """The model's offer is void. It must make another one."""

    model: str


@dataclass(slots=True, eq=False)
class _Standing:
    """What the matching knows of a model. stamp: grows with every offer; entries with another one are outdated."""

    offer: Offer | None = None
    stamp: int = 0
    ready: bool = False


class Matching:
    """The offers of all models and the GPUs for them."""

    def __init__(self, models: Iterable[str], gpus: GpuTable):
        self.gpus = gpus
        self._models = {name: _Standing() for name in models}
        #: (moment to send, latest, deadline, model, stamp) of offers that may not start yet.
        self._timers: list[tuple[float, float, float, str, int]] = []
        #: (latest, deadline, model, stamp) of ready models.
        self._ready: list[tuple[float, float, str, int]] = []

    def add(self, model: str) -> None:
        """One more model makes offers."""
        self._models[model] = _Standing()

    def remove(self, model: str) -> None:
        """The model makes no offer any more; what it has offered is void."""
        heaps: tuple[list[Any], ...] = (self._timers, self._ready)
        for heap in heaps:
            heap[:] = [one for one in heap if one[-2] != model]
            heapq.heapify(heap)
        del self._models[model]

    def offer(self, model: str, offer: Offer | None, now: float) -> None:
        """The model's offer from now on, in the place of the one before."""
        standing = self._models[model]
        before, standing.offer = standing.offer, offer
        if offer == before:
            return
        standing.stamp += 1
        if offer is None:
            standing.ready = False
        elif standing.ready and offer.earliest - offer.delay <= now:
            self._push_ready(model, offer, standing)  # No GPU was free for it, and none has become free since.
        else:
            standing.ready = False
            when = min(offer.earliest, offer.latest) - offer.delay
            self._push(self._timers, (when, offer.latest, offer.deadline, model, standing.stamp))

    def _push_ready(self, model: str, offer: Offer, standing: _Standing) -> None:
        standing.ready = True
        self._push(self._ready, (offer.latest, offer.deadline, model, standing.stamp))

    def _push(self, heap: list[Any], entry: tuple[Any, ...]) -> None:
        if len(heap) > OUTDATED * (1 + len(self._models)):
            heap[:] = [one for one in heap if self._models[one[-2]].stamp == one[-1]]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

    def next(self, now: float) -> Grant | Expired | None:
        """What is due by ``now`` and comes first; None if nothing is."""
        while True:
            idle = self.gpus.first_idle(now)
            ready = self._first(self._ready)
            if ready is not None:
                model, offer = ready
                gpu = idle or self._arriving(now, offer.delay)
                if gpu is not None:
                    if gpu.free > offer.latest:
                        return self._expire(model)
                    if self._lets(gpu, offer, now):
                        return self._grant(model, gpu, offer)
                    continue
            timer = self._first(self._timers)
            if timer is not None and self._timers[0][0] <= now:
                heapq.heappop(self._timers)
                model, offer = timer
                if offer.latest < offer.earliest:
                    return self._expire(model)
                gpu = idle or self._arriving(offer.earliest)
                if gpu is not None and self._lets(gpu, offer, now):
                    return self._grant(model, gpu, offer)
                self._push_ready(model, offer, self._models[model])
            elif ready is not None and ready[1].latest - ready[1].delay <= now:
                return self._expire(ready[0])
            else:
                return None

    def next_wake(self, now: float) -> float:
        """When `next` is to be called again. ``now`` or earlier: at once."""
        wake = self._timers[0][0] if self._first(self._timers) is not None else math.inf
        ready = self._first(self._ready)
        if ready is not None:
            offer = ready[1]
            wake = min(wake, offer.latest - offer.delay)
            if self.gpus.first_idle(now) is not None:
                return now
            gpu = self.gpus.next_free()
            if gpu is not None:
                wake = min(wake, gpu.free - offer.delay)
        return wake

    def _first(self, heap: list[Any]) -> tuple[str, Offer] | None:
        """The model of the first entry that is not outdated, with its offer."""
        while heap:
            model, stamp = heap[0][-2:]
            standing = self._models[model]
            if standing.stamp == stamp and standing.offer is not None:
                return model, standing.offer
            heapq.heappop(heap)
        return None

    def _arriving(self, by: float, delay: float = 0.0) -> Gpu | None:
        """The GPU that becomes free next, if it is free ``delay`` after ``by``. None is idle now.

        The sum is rounded as in `next_wake`. Else a GPU might not be there at the very moment of the wake.
        """
        gpu = self.gpus.next_free()
        return gpu if gpu is not None and gpu.free - delay <= by else None

    def _lets(self, gpu: Gpu, offer: Offer, now: float) -> bool:
        """Whether the GPU stays long enough for the batch. One that does not gets no batch any more.

        A pipeline where the batch would stand for too long behind a larger one gets none until that one is further.
        """
        behind = gpu.ends - offer.overlap
        if behind > max(gpu.free, offer.latest):
            self.gpus.hold(gpu, behind)
            return False
        if max(gpu.free, behind, now + offer.delay) + offer.seconds <= gpu.leaving:
            return True
        self.gpus.close(gpu)
        return False

    def _grant(self, model: str, gpu: Gpu, offer: Offer) -> Grant:
        self._withdraw(model)
        return Grant(model, gpu, offer.size)

    def _expire(self, model: str) -> Expired:
        self._withdraw(model)
        return Expired(model)

    def _withdraw(self, model: str) -> None:
        standing = self._models[model]
        standing.offer = None
        standing.stamp += 1
        standing.ready = False

    def validate(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self.gpus.validate()
        timed = {(model, stamp) for *_, model, stamp in self._timers}
        waiting = {(model, stamp) for *_, model, stamp in self._ready}
        for name, standing in self._models.items():
            entry = (name, standing.stamp)
            assert (entry in timed) == (standing.offer is not None and not standing.ready), f"timer of {name}"
            assert (entry in waiting) == standing.ready, f"ready entry of {name}"

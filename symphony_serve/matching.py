"""Which model gets which GPU, and when (algorithm 1). It sees one offer of each model, and no request.

A model's offer waits until its batch may start. If a GPU is free then, the model gets it; else the model is *ready* and
waits for the next GPU. A GPU that becomes free goes to the ready model whose batch must start soonest, of those that it
holds. Ties: the earlier deadline, then the model's name. Of idle GPUs that hold a model, it gets one with the fewest
models, because the others can serve more. What happens at one moment happens in this order: GPUs become free, batches
may start, offers expire.

All is found in O(log models + log GPUs) for each pool of GPUs with the same models, and mostly there is one pool: no
step looks at all models or all GPUs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from symphony_serve.gpu_table import Gpu, GpuTable, Held

#: A heap is built anew without its outdated entries when it has this many times the entries that there are models. Each
#: arrival makes one entry outdated, and so an arrival still costs O(log models) on average.
OUTDATED = 64


class Offer(NamedTuple):
    """The batch that a model could run next, as the matching sees it.

    earliest, latest: it may start on a GPU between these moments; after ``latest`` the offer is void. deadline: its
        earliest deadline. overlap: its last seconds, in which the GPU can run the next batch.
    """

    earliest: float
    latest: float
    deadline: float
    overlap: float = 0.0


class Grant(NamedTuple):
    """The model gets this GPU. It sends a batch or not, and makes another offer."""

    model: str
    gpu: Gpu


class Expired(NamedTuple):
    """The model's offer is void. It must make another one."""

    model: str


@dataclass(slots=True, eq=False)
class _ModelState:
    """What the matching knows of a model. stamp: grows with every offer; entries of heaps with another are outdated.

    pools: of the GPUs that hold it. That of all models is one of them.
    """

    pools: tuple[Held, ...]
    offer: Offer | None = None
    stamp: int = 0
    ready: bool = False


class Matching:
    """The offers of all models and the GPUs for them."""

    def __init__(self, models: Iterable[str], gpus: GpuTable):
        self.gpus = gpus
        self._models = {name: _ModelState(self._pools(name)) for name in models}
        #: (moment to send, latest, deadline, model, stamp) of offers that may not start yet.
        self._timers: list[tuple[float, float, float, str, int]] = []
        #: By pool, (latest, deadline, model, stamp) of its ready models.
        self._ready: dict[Held, list[tuple[float, float, str, int]]] = {models: [] for models in gpus.pools}

    def add(self, model: str) -> None:
        """One more model makes offers."""
        self._models[model] = _ModelState(self._pools(model))

    def remove(self, model: str) -> None:
        """The model makes no offer any more; what it has offered is void."""
        heaps: tuple[list[Any], ...] = (self._timers, *self._ready.values())
        for heap in heaps:
            heap[:] = [one for one in heap if one[-2] != model]
            heapq.heapify(heap)
        del self._models[model]

    def spread(self) -> None:
        """GPUs have come, gone, or hold other models: there may be other pools."""
        if self._ready.keys() == self.gpus.pools.keys():
            return
        self._ready = {models: [] for models in self.gpus.pools}
        for name, known in self._models.items():
            known.pools = self._pools(name)
            if known.ready and known.offer is not None:
                self._push_ready(name, known.offer, known)

    def _pools(self, model: str) -> tuple[Held, ...]:
        return tuple(held for held in self.gpus.pools if held is None or model in held)

    def offer(self, model: str, offer: Offer | None, now: float) -> None:
        """The model's offer from now on, in the place of the one before."""
        known = self._models[model]
        before, known.offer = known.offer, offer
        if offer == before:
            return
        known.stamp += 1
        if offer is None:
            known.ready = False
        elif known.ready and offer.earliest <= now:
            self._push_ready(model, offer, known)  # No GPU was free for it, and none has become free since.
        else:
            known.ready = False
            when = min(offer.earliest, offer.latest)
            self._push(self._timers, (when, offer.latest, offer.deadline, model, known.stamp))

    def _push_ready(self, model: str, offer: Offer, known: _ModelState) -> None:
        known.ready = True
        for held in known.pools:
            self._push(self._ready[held], (offer.latest, offer.deadline, model, known.stamp))

    def _push(self, heap: list[Any], entry: tuple[Any, ...]) -> None:
        if len(heap) > OUTDATED * (1 + len(self._models)):
            heap[:] = [one for one in heap if self._models[one[-2]].stamp == one[-1]]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

    def next(self, now: float) -> Grant | Expired | None:
        """What is due by ``now`` and comes first; None if nothing is."""
        while True:
            ready = self._first_with_gpu(now)
            if ready is not None:
                model, offer, gpu = ready
                if self._lets(gpu, offer):
                    return self._withdrawn(Grant(model, gpu))
                continue
            timer = self._first(self._timers)
            if timer is not None and self._timers[0][0] <= now:
                heapq.heappop(self._timers)
                model, offer = timer
                if offer.latest < offer.earliest:
                    return self._withdrawn(Expired(model))
                first = self._gpu(model, now)
                if first is not None and self._lets(first, offer):
                    return self._withdrawn(Grant(model, first))
                self._push_ready(model, offer, self._models[model])
                continue
            for heap in self._ready.values():
                late = self._first(heap)
                if late is not None and late[1].latest <= now:
                    return self._withdrawn(Expired(late[0]))
            return None

    def next_wake(self, now: float) -> float:
        """When `next` is to be called again. ``now`` or earlier: at once."""
        wake = self._timers[0][0] if self._first(self._timers) is not None else math.inf
        for held, heap in self._ready.items():
            ready = self._first(heap)
            if ready is not None:
                wake = min(wake, ready[1].latest)
                if self.gpus.first_idle(now, held) is not None:
                    return now
                gpu = self.gpus.next_free(held)
                if gpu is not None:
                    wake = min(wake, gpu.free)
        return wake

    def _first_with_gpu(self, now: float) -> tuple[str, Offer, Gpu] | None:
        """The ready model that is first of those for which a GPU is there."""
        found, first = None, (math.inf, math.inf, "", 0)
        for heap in self._ready.values():
            ready = self._first(heap)
            if ready is not None and (found is None or heap[0] < first):
                gpu = self._gpu(ready[0], now)
                if gpu is not None:
                    found, first = (*ready, gpu), heap[0]
        return found

    def _first(self, heap: list[Any]) -> tuple[str, Offer] | None:
        """The model of the first entry that is not outdated, with its offer."""
        while heap:
            model, stamp = heap[0][-2:]
            known = self._models[model]
            if known.stamp == stamp and known.offer is not None:
                return model, known.offer
            heapq.heappop(heap)
        return None

    def _gpu(self, model: str, now: float) -> Gpu | None:
        """An idle GPU that holds the model."""
        pools = self._models[model].pools
        idle = [gpu for held in pools if (gpu := self.gpus.first_idle(now, held)) is not None]
        return min(idle, key=_serves_least) if len(idle) > 1 else idle[0] if idle else None

    def _lets(self, gpu: Gpu, offer: Offer) -> bool:
        """Whether the batch may go to the GPU.

        A pipeline where the batch would stand for too long behind a larger one gets none until that one is further.
        """
        behind = gpu.ends - offer.overlap
        if behind > max(gpu.free, offer.latest):
            self.gpus.set_free(gpu, behind)
            return False
        return True

    def _withdrawn(self, due: Grant | Expired) -> Grant | Expired:
        """The same; the model has no offer any more."""
        known = self._models[due.model]
        known.offer = None
        known.stamp += 1
        known.ready = False
        return due


def _serves_least(gpu: Gpu) -> tuple[float, int]:
    """How many models it holds, then its id."""
    return (math.inf if gpu.models is None else len(gpu.models), gpu.id)

"""The GPUs, when each will be free, and what was sent to each. Which model gets a GPU is not decided here.

GPUs that hold the same models form a *pool*. Mostly there is one, of those that hold all models.

A GPU is free from a moment that is predicted: the end of the last batch that was sent to it, or of the part of it that
keeps the next one from starting (`Profile.part`). What its backend tells corrects the prediction.

A GPU may be a pipeline of stages. With L(b) the seconds of a batch and O(b) those of its largest stage, it ends at
``max(start + L(b), end of the one before + O(b))`` (AlpaServe's simulator, for batches of one profile). Then
``ends - (L(b) - O(b))`` is the moment at which the batch would have started if nothing had stood in its way.

To find the first idle GPU, or the next one that becomes free, takes O(log GPUs): the heaps keep outdated entries until
these come to the top.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from symphony_serve.messages import Dispatch

#: The models that the GPUs of a pool hold; None: all.
Held = frozenset[str] | None

#: A batch that is not answered this many times its seconds after its start makes its GPU suspect; where times vary,
#: this many times the longest that it may take. That is far outside of what a batch's time varies, and short compared
#: with the time to start a process.
PATIENCE = 3.0


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU.

    token: names the time for which it is ours. free: when it can or will be able to start a batch. ends: when it has
    run all that was sent to it; later than ``free`` on a pipeline only. models: that it holds.
    plans: how many batches were sent to it under this token. sent: those that it has not answered, the oldest first.
    leaves: it gets no batch any more. stamp: another one after every change; a heap's entry with an older one is
    outdated. No two GPUs have the same one, not even a GPU and the same one when it has come back.
    """

    id: int
    token: int
    free: float
    ends: float
    models: Held = None
    plans: int = 0
    sent: deque[Dispatch] = field(default_factory=deque)
    leaves: bool = False
    stamp: int = -1
    idle: bool = False


class _Pool:
    """Heaps of the GPUs of a pool: (0, id, stamp) of idle ones; (free, id, stamp) of others that can get a batch."""

    def __init__(self) -> None:
        self.idle: list[tuple[float, int, int]] = []
        self.busy: list[tuple[float, int, int]] = []


class GpuTable:
    """All GPUs of a sub-cluster.

    One thing: each method takes in what has become known of a GPU, or says which one is free when.

    ahead: how many batches may be sent to a GPU that has not answered the one before: those that the other stages of a
    pipeline run. least_patience: seconds after the start of a batch before which its GPU is not suspect.
    """

    def __init__(self, ahead: int = 0, least_patience: float = 0.0):
        self._ahead = ahead
        self._least_patience = least_patience
        self._stamps = itertools.count()
        self.gpus: dict[int, Gpu] = {}
        #: That of all models is always there, the others as long as they have a GPU.
        self.pools: dict[Held, _Pool] = {None: _Pool()}
        #: (moment, id, token, plan): a GPU is suspect if it has not answered by then.
        self._watch: list[tuple[float, int, int, int]] = []

    def join(self, gpu: int, token: int, now: float, models: Held = None) -> None:
        """A GPU that is not in the table comes."""
        self.gpus[gpu] = Gpu(gpu, token, now, now)
        self.hold(self.gpus[gpu], models)

    def hold(self, gpu: Gpu, models: Held) -> None:
        """The GPU holds these models from now on."""
        gpu.models = models
        self.pools.setdefault(models, _Pool())
        self.set_free(gpu, gpu.free)
        self._clear()

    def drop(self, gpu: int) -> list[Dispatch]:
        """The GPU is gone, if it was there. Returns what it has not answered."""
        record = self.gpus.pop(gpu, None)
        self._clear()
        return list(record.sent) if record is not None else []

    def _clear(self) -> None:
        """Have no pool without a GPU, but that of all models."""
        if len(self.pools) > 1:
            held = {None, *(gpu.models for gpu in self.gpus.values())}
            self.pools = {models: pool for models, pool in self.pools.items() if models in held}

    def first_idle(self, now: float, models: Held = None) -> Gpu | None:
        """Of the pool of ``models``, the idle GPU with the smallest id (algorithm 1): so others can be given back."""
        pool = self.pools[models]
        busy = pool.busy
        while busy and busy[0][0] <= now:
            _, gpu, stamp = heapq.heappop(busy)
            record = self.gpus.get(gpu)
            if record is not None and record.stamp == stamp:
                record.idle = True
                heapq.heappush(pool.idle, (0.0, gpu, stamp))
        return self._top(pool.idle)

    def next_free(self, models: Held = None) -> Gpu | None:
        """The GPU of the pool of ``models`` that becomes free next. Call `first_idle` before."""
        return self._top(self.pools[models].busy)

    def _top(self, heap: list[tuple[float, int, int]]) -> Gpu | None:
        while heap:
            record = self.gpus.get(heap[0][1])
            if record is not None and record.stamp == heap[0][2]:
                return record
            heapq.heappop(heap)
        return None

    def send(self, gpu: Gpu, dispatch: Dispatch) -> None:
        """The batch was sent to the GPU, which is free after it, or before by its overlap."""
        gpu.plans += 1
        gpu.sent.append(dispatch)
        patience = max(PATIENCE * max(dispatch.seconds, dispatch.longest), self._least_patience)
        heapq.heappush(self._watch, (dispatch.start + patience, gpu.id, gpu.token, dispatch.plan))
        gpu.ends = dispatch.start + dispatch.seconds
        self.set_free(gpu, gpu.ends - dispatch.overlap)

    def close(self, gpu: Gpu) -> None:
        """The GPU gets no batch any more."""
        gpu.leaves = True
        gpu.stamp = next(self._stamps)

    def answer(self, gpu: int, token: int, plan: int, now: float) -> Dispatch | None:
        """A GPU has finished this batch; None: the answer is outdated."""
        record = self.gpus.get(gpu)
        sent = record.sent if record is not None and record.token == token else ()
        over = next((one for one in sent if one.plan == plan), None)
        if record is None or over is None:
            return None
        full = len(record.sent) > self._ahead  # It is in no heap then, and will be in one: there is room for a batch.
        record.sent.remove(over)
        free = ends = now
        for waiting in record.sent:
            ends = max(waiting.start + waiting.seconds, ends + (waiting.seconds - waiting.overlap))
            free = ends - waiting.overlap
        record.ends = ends
        if full or free != record.free:
            self.set_free(record, free)
        return over

    def passed(self, gpu: int, token: int, plan: int, now: float) -> None:
        """A batch has left a pipeline's first stage. If it is the newest one, the GPU is free.

        It was predicted to be so when the batch is as slow as few are. What is left of it is predicted still.
        """
        record = self.gpus.get(gpu)
        if record is not None and record.token == token and record.sent and record.sent[-1].plan == plan:
            record.ends = min(record.ends, now + record.sent[-1].overlap)
            if record.free > now:
                self.set_free(record, now)

    def suspects(self, now: float) -> list[Gpu]:
        """GPUs that should have answered long ago."""
        found = []
        while self._watch and self._watch[0][0] <= now:
            _, gpu, token, plan = heapq.heappop(self._watch)
            record = self.gpus.get(gpu)
            unanswered = record is not None and record.token == token and plan in [one.plan for one in record.sent]
            if record is not None and unanswered and record not in found:
                found.append(record)
        return found

    def wait_longer(self, seconds: float) -> None:
        """No answer could be heard for so long."""
        # All by as much, so it stays a heap.
        self._watch = [(at + seconds, gpu, token, plan) for at, gpu, token, plan in self._watch]

    def watch_at(self) -> float:
        """When `suspects` is to be called next."""
        return self._watch[0][0] if self._watch else math.inf

    def set_free(self, gpu: Gpu, free: float) -> None:
        """The GPU gets no batch before ``free``."""
        gpu.free = free
        gpu.stamp = next(self._stamps)
        gpu.idle = False
        if not gpu.leaves and len(gpu.sent) <= self._ahead:
            heapq.heappush(self.pools[gpu.models].busy, (gpu.free, gpu.id, gpu.stamp))

"""What holds between two calls of a scheduler and its parts. A function raises AssertionError where it does not."""

from __future__ import annotations

import itertools

from symphony_serve.batching import BatchFormer
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.window import Window
from symphony_serve.gpu_table import GpuTable
from symphony_serve.matching import Matching
from symphony_serve.scheduler import Scheduler


def unanswered(scheduler: Scheduler) -> frozenset[int]:
    """The ids of the requests that are neither answered nor refused."""
    return frozenset(scheduler._open)


def check_scheduler(scheduler: Scheduler, now: float) -> None:
    check_matching(scheduler._matching, now)
    held = [request.id for side in scheduler._sides.values() for request in side.former.waiting()]
    for gpu in scheduler._gpus.gpus.values():
        held += [request.id for batch in gpu.sent for request in batch.requests]
    assert sorted(held) == sorted(scheduler._open), "a request is lost, or held twice"
    for side in scheduler._sides.values():
        check_former(side.former)


def check_matching(matching: Matching, now: float) -> None:
    check_gpus(matching.gpus, now)
    timed = {(model, stamp) for *_, model, stamp in matching._timers}
    assert matching._ready.keys() == matching.gpus.pools.keys(), "pools"
    waiting = {(model, held, stamp) for held, heap in matching._ready.items() for *_, model, stamp in heap}
    for name, known in matching._models.items():
        entry = (name, known.stamp)
        assert (entry in timed) == (known.offer is not None and not known.ready), f"timer of {name}"
        for held in known.pools:
            assert ((name, held, known.stamp) in waiting) == known.ready, f"ready entry of {name}"


def check_gpus(table: GpuTable, now: float) -> None:
    """The table finds the GPUs that a look at every one of them finds."""
    assert table.pools.keys() == {None, *(gpu.models for gpu in table.gpus.values())}, "pools"
    for models in table.pools:
        pool = [gpu for gpu in table.gpus.values() if gpu.models == models]
        able = [gpu for gpu in pool if not gpu.leaves and len(gpu.sent) <= table._ahead]
        idle = min((gpu.id for gpu in able if gpu.free <= now), default=None)
        busy = min(((gpu.free, gpu.id) for gpu in able if gpu.free > now), default=(0.0, None))[1]
        found = table.first_idle(now, models), table.next_free(models)
        assert [gpu and gpu.id for gpu in found] == [idle, busy], f"GPUs with {models}"
    for gpu in table.gpus.values():
        assert len(gpu.sent) <= 1 + table._ahead, f"GPU {gpu.id} has {len(gpu.sent)} batches"
        plans = [one.plan for one in gpu.sent]
        assert plans == sorted(set(plans)) and all(plan < gpu.plans for plan in plans), plans


def check_former(former: BatchFormer) -> None:
    if isinstance(former, Window):
        assert 0 <= former._head <= len(former._queue), (former._head, len(former._queue))
        left = former._queue[former._head :]
        assert all(one < other for one, other in itertools.pairwise(left)), "the queue is not in order"
        assert 0 <= former._size <= len(left), (former._size, len(left))
        return
    assert isinstance(former, Orloj), former
    held = set[int]()
    for one in former._classes:
        keys = one.pending.keys
        assert keys == sorted(keys)
        assert all(former._requests[number].deadline - former._delays.margin == deadline for deadline, number in keys)
        held.update(one.pending.deadlines)
    assert held == former._requests.keys()

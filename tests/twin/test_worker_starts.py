"""Worker processes that start on a machine with few cores."""

from __future__ import annotations

import heapq
import math
from itertools import count

import pytest

from fluidtune.twin.worker_starts import WorkerStarts


@pytest.mark.parametrize(
    ("at_once", "there"),
    [
        (math.inf, [3.0, 3.0, 3.0, 3.0, 3.0]),
        (2.0, [3.0, 3.0, 6.0, 6.0, 9.0]),
        (1.5, [4.0, 4.0, 8.0, 8.0, 12.0]),
        (1.0, [3.0, 6.0, 9.0, 12.0, 15.0]),
    ],
)
def test_workers_start_in_the_order_asked_for_and_not_too_many_at_a_time(at_once, there):
    heap, order, now, came = [], count(), 0.0, []
    starts = WorkerStarts(3.0, at_once, lambda after, what: heapq.heappush(heap, (now + after, next(order), what)))
    for k in range(5):
        starts.start_worker(lambda k=k: came.append((k, now)))
    while heap:
        now, _, what = heapq.heappop(heap)
        what()
    assert came == [(k, pytest.approx(at)) for k, at in enumerate(there)]

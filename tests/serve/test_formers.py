"""The formers fifo and window: the contract, and what tells them apart."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.batching import Candidate
from symphony_serve.batching.window import Window, target_batch
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.errors import ServeError
from symphony_serve.model_side import DEFERRED
from symphony_serve.profiles import Profile
from tests.serve.batch_formers import BatchFormerContract, request

#: The model of Table 2 with the strong batching effect: seconds for each request and each batch, and its SLO.
TABLE_2 = Profile.linear(1.053e-3, 5.072e-3, 64)
TABLE_2_SLO = 25e-3


class TestFifo(BatchFormerContract):
    @pytest.fixture
    def make(self):
        return lambda seconds: Fifo(Profile.from_seconds(seconds), 12.0, NO_DELAYS)


class TestWindow(BatchFormerContract):
    @pytest.fixture
    def make(self):
        return lambda seconds: Window(Profile.from_seconds(seconds), 12.0, NO_DELAYS)


class TestGathering:
    def test_window_equals_its_definition(self):
        """The pointer that never goes back gives what a search from the head gives, whatever comes in between."""
        for seed in range(30):
            rng = random.Random(seed)
            target = rng.randrange(1, 7)
            fast, now = Window(Profile.linear(1.0, 5.0, 8), 12.0, NO_DELAYS), 0.0
            fast.target = target
            plain: list[tuple[float, int]] = []
            for number in range(200):
                now += rng.choice([0.0, 0.25, 1.0, 4.0])
                for extra in range(rng.randrange(4)):
                    entry = (now + rng.uniform(5.0, 20.0), 10 * number + extra)
                    fast.add(request(entry[1], entry[0]))
                    plain.append(entry)
                plain.sort()
                size = _window_by_definition(plain, now, target, lambda b: b + 5.0 if b <= 8 else math.inf)
                candidate = fast.form(now)
                assert (candidate.size if candidate else 0) == size
                assert [waiting.id for waiting in fast.waiting()] == [entry[1] for entry in plain]
                if rng.random() < 0.4:
                    fast.take()
                    del plain[:size]
                elif rng.random() < 0.1 and plain:
                    fast.remove(plain.pop(rng.randrange(len(plain)))[1])


def _window_by_definition(queue, now, target, latency):
    """The size of the batch; removes the heads that are given up from ``queue``, a sorted list of (deadline, id)."""
    count = len(queue)
    first = next((i for i in range(count) if now + latency(count - i) <= queue[i][0]), count)
    size = min(target, count - first)
    if size == 0:
        queue.clear()
        return 0
    while queue[0][0] < now + latency(size):
        del queue[0]
    while size < len(queue) and now + latency(size + 1) <= queue[0][0]:
        size += 1
    return size


class TestTarget:
    def test_table_2_at_its_goodput(self):
        """Golden example 4: l(16)*(1 + 1/7.21) = 24.96 <= 25 ms; b = 17 takes 26.2 ms."""
        assert target_batch(TABLE_2, 5264.0, TABLE_2_SLO) == 16

    def test_the_former_follows_the_rate(self):
        former = Window(TABLE_2, TABLE_2_SLO, NO_DELAYS)
        assert former.target == 7
        former.set_rate(5264.0)
        assert former.target == 16


class TestDelays:
    """l(b) = b + 5, with a margin of 1 s."""

    @pytest.mark.parametrize("former", [Fifo, Window])
    def test_a_batch_has_time_for_its_answers(self, former):
        made = former(Profile.linear(1.0, 5.0, 8), 20.0, Delays(response=0.75, jitter=0.25))
        for number in range(3):
            made.add(request(number, 13.0))
        candidate = made.form(4.0)
        assert candidate == Candidate(3, 12.0, 8.0, 9.0)
        assert made.changes_at() == 4.0
        candidate = made.form(4.1)
        assert candidate.size == 2

    def test_a_wrong_delay_is_refused(self):
        for wrong in (-1.0, math.inf):
            with pytest.raises(ServeError, match=f"delay jitter is {wrong}"):
                Delays(jitter=wrong)


def test_a_full_batch_starts_at_once():
    """Golden example 8."""
    former = Fifo(Profile.linear(1.0, 5.0, 2), 12.0, NO_DELAYS)
    for number in range(3):
        former.add(request(number, 20.0))
    assert DEFERRED.earliest(former.form(0.0)) == -math.inf

"""How many GPUs the load wants: the golden examples, and that advice does not go to and fro."""

from __future__ import annotations

import pytest

from symphony_serve.autoscale import Autoscaler, Sample, gpus_for
from symphony_serve.errors import ServeError
from symphony_serve.profiles import Profile

RESNET = Profile.linear(1.053e-3, 5.072e-3, 128)
#: The ten models of figure 2.
TEN = {f"m{number}": (RESNET, 0.1) for number in range(10)}


def ten(rate, good=None, gpus=24, idle=0.0, seconds=10.0):
    """A sample of figure 2: rates and good are per second, all models together."""
    offered = dict.fromkeys(TEN, round(rate * seconds / 10))
    answered = round((rate if good is None else good) * seconds)
    return Sample(seconds, gpus, (1 - idle) * gpus * seconds, offered, answered)


def test_gpus_for_a_rate():
    """Golden example 3: six GPUs bear 4313 requests/s, seven 5031.9."""
    assert 6 < gpus_for([(RESNET, 0.025, 5000.0)]) <= 7


class TestAutoscaler:
    def test_more_when_requests_are_refused(self):
        """Golden example 6: r = 0.293, 9.96 more than 24, so 34 in all."""
        assert Autoscaler(TEN).add(ten(30_000, 21_200)) == 34

    def test_fewer_when_gpus_are_idle(self):
        """Golden example 6: 20.1 of 24 are idle; 17 are given back, when they were idle for a minute."""
        scaler = Autoscaler(TEN)
        told = [scaler.add(ten(3000, idle=0.839)) for _ in range(7)]
        assert told == [24] * 5 + [7] * 2

    def test_what_stays_bears_the_rate(self):
        """The GPUs say that they are idle, but the load needs 15 (a guess from profiles alone)."""
        scaler = Autoscaler(TEN)
        told = [scaler.add(ten(13_000, idle=0.9)) for _ in range(6)]
        needed = gpus_for([(RESNET, 0.1, 1300.0)] * 10)
        assert 14 < needed <= 15
        assert told[-1] == 15

    def test_what_was_seen_with_other_gpus_does_not_count(self):
        scaler = Autoscaler(TEN)
        for _ in range(6):
            scaler.add(ten(3000, idle=0.839))
        assert scaler.add(ten(3000, gpus=12, idle=0.7)) == 12

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: Sample(0.0, 1, 0.0, {}, 0), "is no sample"),
            (lambda: Sample(1.0, 1, 0.0, {"m0": 3}, 4), "at most 3 requests"),
            (lambda: Autoscaler(TEN).add(Sample(1.0, 1, 0.0, {"x": 1}, 1)), "model 'x', expected one of m0"),
        ],
    )
    def test_what_is_refused(self, make, said):
        with pytest.raises(ServeError, match=said):
            make()

"""Profiles: the seconds of a batch by its size, measured, corrected by what is seen, and kept."""

from __future__ import annotations

import asyncio
import logging
import math
from unittest.mock import AsyncMock

import pytest

from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.profiles import Profile, check_slo, profiles_from_json, profiles_to_json
from symphony_serve.seen_times import ENOUGH, EVERY, RECENT, SeenTimes
from symphony_serve.shell import measuring
from symphony_serve.shell.device import LocalDevice

HUGE = 10**400


def test_the_largest_batch_within_a_time():
    profile = Profile.linear(1.0, 5.0, 8)
    assert [profile.largest(seconds) for seconds in (-1.0, 0.0, 5.9, 6.0, 9.5, 13.0, math.inf)] == [0, 0, 0, 1, 4, 8, 8]


def test_a_table_that_falls_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        profile = Profile.from_seconds([3.0, 2.0, 5.0, 4.0])
    assert [profile.seconds(size) for size in (1, 2, 3, 4)] == [3.0, 3.0, 5.0, 5.0]
    assert "2 of its 4 sizes" in caplog.text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Profile.linear(-1.0, 5.0, 4), "alpha is -1.0"),
        (lambda: Profile.linear(1.0, -5.0, 4), "beta is -5.0"),
        (lambda: Profile.linear(math.nan, 5.0, 4), "alpha is nan"),
        (lambda: Profile.linear(0.0, 0.0, 4), "takes 0.0 s"),
        (lambda: Profile.linear(1.0, 5.0, 0), "no entry"),
        (lambda: Profile.from_seconds([]), "no entry"),
        (lambda: Profile.from_seconds([1.0, math.inf]), "a batch of 2 takes inf s"),
        (lambda: check_slo("m", Profile.linear(1.0, 5.0, 4), 6.5, delay=1.0), "an SLO of at least 7.0 s"),
        (lambda: check_slo("m", Profile.linear(1.0, 5.0, 4), math.nan), "SLO of nan s"),
        (lambda: check_slo("m", Profile.linear(1.0, 5.0, 4), math.inf), "SLO of inf s, expected finite seconds"),
        (lambda: profiles_from_json("{"), "are not JSON"),
        (lambda: profiles_from_json("[]"), "have format list, expected 1"),
        (lambda: profiles_from_json('{"format": 2, "device": "cpu", "seconds": {}}'), "have format 2, expected 1"),
        (lambda: profiles_from_json('{"format": 1, "seconds": {"m": 3}}'), "an entry that is no list"),
        (lambda: profiles_from_json('{"format": 1, "seconds": {"m": [-1.0]}}'), "takes -1.0 s"),
        (lambda: profiles_from_json('{"format": 1, "seconds": {}, "delays": {"m": -1}}'), "the kept delays are"),
        # Seen: kept profiles with an integer of 400 digits were a traceback.
        (lambda: profiles_from_json(f'{{"format": 1, "seconds": {{"m": [{HUGE}]}}}}'), "profiles"),
        (lambda: profiles_from_json(f'{{"format": 1, "seconds": {{}}, "delays": {{"m": {HUGE}}}}}'), "the kept delays"),
    ],
)
def test_what_is_refused_names_the_value(make, said):
    with pytest.raises(ServeError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.fixture
def short(monkeypatch):
    """Each size is run twice."""
    monkeypatch.setattr(measuring, "LEAST_RUNS", 2)
    monkeypatch.setattr(measuring, "SECONDS_EACH", 0.0)
    monkeypatch.setattr(measuring, "WAKES", 5)


async def test_the_delays_are_measured_with_a_model_that_a_device_has():
    """The first by name is on none, and its profile is known."""
    known = {"a": Profile.linear(0.001, 0.0, 2)}
    (a, _) = await measure_models([{"m": list}], {"a": [1], "m": [1]}, {"a": 5.0, "m": 5.0}, profiles=known)
    assert (a.name, a.profile) == ("a", known["a"])


async def test_a_device_that_is_lost_while_the_delays_are_measured_is_waited_for(short):
    """Seen: its loss ended the start of the service."""
    there, waited = [], []

    async def back():
        waited.append(len(there))
        return len(waited) > 1

    def run(values):
        there.append(values)
        if len(there) == 3 or (len(there) > 3 and len(waited) < 2):
            raise DeviceLost("killed", back)
        return list(values)

    (model,) = await measure_models([{"m": run}], {"m": [1]}, {"m": 5.0}, profiles={"m": Profile.linear(0.001, 0.0, 1)})
    assert waited == [3, 3] and model.delays.response > 0 and len(there) > 3


async def measure_models(functions, *given, **named):
    return await measuring.measure_models([LocalDevice(one) for one in functions], *given, **named)


async def test_sizes_are_doubled(short):
    runs = [AsyncMock(side_effect=list) for _ in range(2)]
    assert (await measuring.measure_profile(runs, [1, 2, 3], 10.0, 12)).max_batch == 12
    assert [sorted({len(call.args[0]) for call in one.call_args_list}) for one in runs] == [[1, 2, 4, 8, 12]] * 2


async def test_sizes_end_where_a_batch_fails_or_takes_longer_than_the_slo(short, caplog):
    async def fails(values):
        if len(values) >= 8:
            raise MemoryError("too many")
        return values

    assert (await measuring.measure_profile([fails], [1], 10.0, 64)).max_batch == 4
    assert "A batch of 8 failed with MemoryError" in caplog.text
    assert (await measuring.measure_profile([AsyncMock(side_effect=list)], [1], 1e-12, 64)).max_batch == 1


class Mortal:
    """A device that is lost in its next batches of 16, so many times, and comes back when it is asked a second time."""

    models = frozenset("m")

    def __init__(self, deaths=0):
        self.deaths, self.backs, self.there, self.runs = deaths, [], True, 0

    async def run(self, model, inputs):
        assert self.there, "it is used while it is lost"
        if len(inputs) == 16 and self.deaths:
            self.deaths, self.there, self.backs = self.deaths - 1, False, [False, True]
            raise DeviceLost("killed", self._back)
        self.runs += 1
        try:
            await asyncio.sleep(0.001)
        finally:
            self.runs -= 1
        return inputs

    async def _back(self):
        self.there = self.backs.pop(0)
        return self.there

    async def check(self):
        """It is not asked."""


@pytest.mark.parametrize(("deaths", "most"), [((0, 1), 64), ((1, 1), 64), ((0, 3), 8)])
async def test_a_device_that_is_lost_while_a_size_is_measured_is_waited_for(short, deaths, most):
    devices = [Mortal(one) for one in deaths]
    (model,) = await measuring.measure_models(devices, {"m": [1]}, {"m": 5.0})
    assert model.profile.max_batch == most
    assert all(one.there for one in devices)


async def test_a_measurement_that_failed_on_one_device_goes_on_on_none(short):
    devices = [Mortal(), Mortal()]

    async def fails(inputs):
        if len(inputs) == 4:
            await asyncio.sleep(0)
            raise MemoryError
        return inputs

    runs = [lambda inputs, one=one: one.run("m", inputs) for one in devices]
    assert (await measuring.measure_profile([*runs, fails], [1], 5.0, 64)).max_batch == 2
    assert [one.runs for one in devices] == [0, 0]


async def test_delays_count_against_the_slo(short):
    """A profile that is known, and an SLO that leaves nothing for the way through the threads."""
    known = {"m": Profile.linear(0.0, 0.01, 4)}
    with pytest.raises(ServeError, match=r"SLO of 0.01 s, but a batch of 1 takes 0.01 s and the network"):
        await measure_models([{"m": list}], {"m": [1]}, {"m": 0.01}, profiles=known)
    assert (await measure_models([{"m": list}], {"m": [1]}, {"m": 5.0}, profiles=known))[0].profile == known["m"]


@pytest.mark.parametrize(
    ("functions", "samples", "said"),
    [
        (lambda values: 1 // 0, [1], "a batch of 1 cannot be measured: ZeroDivisionError"),
        (lambda values: [1, 2], [1], "returned 2 outputs for 1 inputs"),
        (list, [], "model m has no sample inputs"),
    ],
)
async def test_models_that_cannot_be_measured(short, functions, samples, said):
    with pytest.raises(ServeError, match=said):
        await measure_models([{"m": functions}], {"m": samples}, {"m": 1.0})


class TestSeenTimes:
    def feed(self, seen, pairs):
        """The last profile that is told, or None."""
        told = None
        for size, seconds in pairs:
            told = seen.add(size, seconds) or told
        return told

    def test_long_batches_correct_it_at_once(self):
        assert SeenTimes(Profile.linear(1.0, 0.0, 4), 100.0).add(2, 6.0).table[1:-1] == (3.0, 6.0, 7.0, 8.0)

    def test_short_batches_correct_it_seldom(self):
        seen = SeenTimes(Profile.linear(1e-4, 0.0, 4), 100.0)
        assert [seen.add(1, 2e-4) is None for _ in range(EVERY)] == [True] * (EVERY - 1) + [False]

    def test_the_part_of_the_batches_that_the_quantile_leaves_takes_longer(self):
        seen = SeenTimes(Profile.linear(0.0, 1.0, 1), 1000.0)
        profile = self.feed(seen, [(1, float(1 + number % 100)) for number in range(100 * EVERY)])
        assert sum(second > profile.seconds(1) for second in range(1, 101)) in (1, 2)

    def test_a_size_that_is_not_run_any_more_is_forgotten(self):
        """Else a size that was slow once would never be tried again."""
        seen = SeenTimes(Profile.linear(1.0, 0.0, 8), 100.0)
        slow = self.feed(seen, [(8, 80.0)] * ENOUGH + [(1, 1.0)] * ENOUGH)
        assert slow.seconds(8) == pytest.approx(80.0)
        assert self.feed(seen, [(1, 1.0)] * (RECENT + EVERY)).seconds(8) == pytest.approx(8.0)


def test_what_is_kept_is_read():
    profiles = {"m": Profile.from_seconds([0.1, 0.2]), "n": Profile.linear(1e-3, 1e-2, 3)}
    assert profiles_from_json(profiles_to_json(profiles, "cpu")) == (profiles, {})
    assert profiles_from_json(profiles_to_json(profiles, "cpu", {"m": 0.5})) == (profiles, {"m": 0.5})

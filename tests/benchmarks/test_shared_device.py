"""The four policies on the virtual clock, compared with results that were worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.shared_device.twin import TwinJob, simulate
from salus_share import Need, SalusError, policy

SMALL = Need(1, 10, 1.0)


def job(name: str, seconds: float, arrival: float = 0.0, need: Need = SMALL, iteration: float = 1.0) -> TwinJob:
    return TwinJob(name, arrival, need, round(seconds / iteration), iteration)


def ends(jobs, name: str, capacity: int = 100) -> dict[str, float]:
    return {key: round(record.ended, 6) for key, record in simulate(jobs, capacity, policy(name)).items()}


def test_fifo_is_one_after_another() -> None:
    jobs = [job("a", 10), job("b", 2, arrival=1), job("c", 3, arrival=0.5)]
    assert ends(jobs, "FIFO") == {"a": 10, "c": 13, "b": 15}


def test_srtf_takes_the_shortest_at_the_next_boundary() -> None:
    jobs = [job("a", 10), job("b", 2, arrival=1.5)]
    assert ends(jobs, "SRTF") == {"b": 4, "a": 12}


def test_pack_is_free_while_the_device_has_room_and_stretched_when_not() -> None:
    half = Need(1, 10, 0.5)
    assert ends([job("a", 10, need=half), job("b", 10, need=half)], "PACK") == {"a": 10, "b": 10}
    assert ends([job("a", 10), job("b", 10)], "PACK") == {"a": 20, "b": 20}


def test_a_lane_that_is_shared_serialises() -> None:
    # Two lanes do not fit: both in one, turn by turn, at full speed.
    big = Need(1, 60, 0.5)
    assert ends([job("a", 10, need=big), job("b", 10, need=big)], "PACK") == {"a": 19, "b": 20}


@pytest.mark.parametrize("ephemeral", [10, 60], ids=["own lanes", "one lane"])
def test_fair_gives_a_third_each_of_a_constant_total(ephemeral) -> None:
    need = Need(1, ephemeral, 1.0)
    jobs = [job(name, 60, arrival, need, 0.1) for name, arrival in (("a", 0), ("b", 15), ("c", 30))]
    records = simulate(jobs, 100, policy("FAIR"), keep_iterations=True)

    def share(name: str, start: float, end: float) -> float:
        return sum(0.1 for at, _ in records[name].iterations if start < at <= end) / (end - start)

    for (start, end), names in (((0, 15), "a"), ((15, 30), "ab"), ((30, 120), "abc")):
        shares = [share(name, start, end) for name in names]
        assert sum(shares) == pytest.approx(1, rel=0.05)
        assert shares == pytest.approx([1 / len(names)] * len(names), rel=0.05)


def test_a_paused_job_pays_for_moving_and_loses_nothing() -> None:
    long, short = Need(10**9, 10**8, 1.0), Need(8 * 10**8, 10**8, 1.0)
    jobs = [job("a", 10, need=long), job("b", 2, arrival=2.5, need=short)]
    records = simulate(jobs, 1.6e9, policy("SRTF"))
    # a stops at 3, has left at 4, b runs to 6, a is loaded at 7 and has 7 s to go.
    assert records["a"].pauses == 1
    assert records["b"].ended == pytest.approx(6)
    assert records["a"].ended == pytest.approx(14)


def test_what_never_fits_is_told() -> None:
    with pytest.raises(SalusError, match="smaller batch"):
        simulate([job("a", 10, need=Need(99, 2))], 100, policy("PACK"))
    with pytest.raises(SalusError, match="same name"):
        simulate([job("a", 1), job("a", 1)], 100, policy("PACK"))

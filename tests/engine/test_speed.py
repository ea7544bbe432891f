"""What the engine concludes from results: speeds, ratios and overheads."""

import math

import pytest

from fluidtune.engine.speed import GroupSpeed, TrialSpeed, overhead, scaled, widest_paying


def recorded(group: GroupSpeed, trial: str, **by_width: tuple[float, int]) -> TrialSpeed:
    """A trial that reported ``w2=(seconds, count)`` and so on, in this order."""
    speed = TrialSpeed()
    for name, (seconds, count) in by_width.items():
        width = float(name[1:].replace("_", "."))
        for _ in range(count):
            speed.record_result(width, seconds)
            group.record_result(trial, speed, width)
    return speed


def test_the_first_result_at_a_width_is_a_warm_up():
    speed = TrialSpeed()
    assert speed.record_result(1, 9.0) and speed.seconds(1) == 9.0 and speed.count(1) == 0
    assert speed.record_result(1, 1.0) and speed.seconds(1) == 1.0
    assert speed.record_result(2, 5.0) and speed.seconds(2) == 5.0
    assert not speed.record_result(1, 7.0)  # back at 1 it is a warm-up again, and a better figure is known
    assert speed.seconds(1) == 1.0
    speed.restart()
    assert not speed.record_result(1, 7.0)
    assert speed.seconds(1) == 1.0
    assert speed.by_width() == {1: 1.0, 2: 5.0}


@pytest.mark.parametrize("width", [0.25, 0.5, 2, 5])
def test_overhead_undoes_equation_3_2(width):
    ratio = 1.1 ** (1 / width - 1) if width < 1 else scaled(1.1, width)
    assert overhead(ratio, width) == pytest.approx(1.1)
    assert overhead(1e-3, width) == 1.0


def test_widest_paying_is_where_the_run_time_stops_falling():
    for beta in (1.05, 1.22, 1.4, 1.7, 3.0):
        times = [scaled(beta, width) for width in range(1, 60)]
        assert widest_paying(beta) == 1 + min(range(59), key=times.__getitem__)
    assert widest_paying(1.0) == math.inf
    assert scaled(9.0, 10_000) == math.inf


def test_a_group_counts_from_three_results_on_and_takes_medians():
    group = GroupSpeed()
    recorded(group, "a", w1=(1.0, 2), w2=(5.0, 3))  # two after the warm-up
    assert group.measured_ratio(2) is None and group.beta == 1.0 and not group.knows_scaling()
    recorded(group, "b", w1=(2.0, 2), w2=(1.2, 3))
    recorded(group, "c", w1=(1.0, 2), w2=(0.6, 3))
    assert group.measured_ratio(2) == pytest.approx(0.6)
    assert group.beta == pytest.approx(1.2)
    assert group.base_seconds() == 1.0
    assert group.ratio(3) == pytest.approx(1.2**2 / 3)


def test_a_gang_is_taken_to_be_as_many_times_slower_on_one_device():
    group, speed = GroupSpeed(), TrialSpeed()
    for seconds in (9.0, 0.75):
        speed.record_result(2, seconds)
    group.record_result("gang", speed, 2, gang=2)
    assert group.base_seconds() == 1.5


def test_a_new_group_asks_the_whole_job_until_it_knows_better():
    job = GroupSpeed()
    recorded(GroupSpeed(job), "a", w1=(2.0, 2), w2=(1.2, 4), w4=(1.8, 4))
    rung = GroupSpeed(job)
    assert rung.base_seconds() == 2.0
    assert rung.knows_scaling()
    assert rung.measured_ratio(4) == pytest.approx(0.9)  # measured, not from beta
    assert rung.beta == pytest.approx((1.2 + 3.6 ** (1 / 3)) / 2)
    recorded(rung, "b", w1=(1.0, 2), w2=(1.0, 4))
    assert rung.base_seconds() == 1.0 and rung.beta == pytest.approx(2.0)
    assert rung.total_iterations() is None

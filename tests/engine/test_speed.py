"""What is concluded from results."""

import math

import pytest

from fluidtune.engine.speed import Pool, Speed, overhead, scaled, widest_paying


def recorded(pool: Pool, trial: str, **by_width: tuple[float, int]) -> Speed:
    """A trial that reported ``w2=(seconds, count)`` and so on, in this order."""
    speed = Speed()
    for name, (seconds, count) in by_width.items():
        width = float(name[1:].replace("_", "."))
        for _ in range(count):
            speed.record(width, seconds)
            pool.record(trial, speed, width)
    return speed


def test_the_first_result_at_a_width_is_a_warm_up():
    speed = Speed()
    assert speed.record(1, 9.0) and speed.seconds(1) == 9.0 and speed.count(1) == 0
    assert speed.record(1, 1.0) and speed.seconds(1) == 1.0
    assert speed.record(2, 5.0) and speed.seconds(2) == 5.0
    assert not speed.record(1, 7.0)  # back at 1: a warm-up again, and known better
    assert speed.seconds(1) == 1.0
    speed.restart()
    assert not speed.record(1, 7.0)
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


def test_beta_of_a_trial_that_never_ran_on_one_worker():
    speed = recorded(Pool(), "a", w2=(1.2, 2), w4=(1.2**3 / 2, 3))
    assert speed.beta() == pytest.approx(1.2)
    assert speed.base() == pytest.approx(2.0)


def test_a_pool_counts_from_three_results_on_and_takes_medians():
    pool = Pool()
    recorded(pool, "a", w1=(1.0, 2), w2=(5.0, 3))  # two past the warm-up
    assert pool.measured_ratio(2) is None and pool.beta == 1.0 and not pool.knows_scaling()
    recorded(pool, "b", w1=(2.0, 2), w2=(1.2, 3))
    recorded(pool, "c", w1=(1.0, 2), w2=(0.6, 3))
    assert pool.measured_ratio(2) == pytest.approx(0.6)
    assert pool.beta == pytest.approx(1.2)
    assert pool.base() == 1.0
    assert pool.ratio(3) == pytest.approx(1.2**2 / 3)
    assert pool.by_width() == pytest.approx({1: 1.0, 2: 0.6})


def test_alpha_from_packed_results():
    pool = Pool()
    recorded(pool, "a", w1=(1.0, 2), w0_5=(1.3, 4))
    assert pool.alpha == pytest.approx(1.3)
    assert pool.ratio(1 / 3) == pytest.approx(1.3**2)


def test_a_new_group_asks_the_whole_job_until_it_knows_better():
    job = Pool()
    recorded(Pool(job), "a", w1=(2.0, 2), w2=(1.2, 4), w4=(1.8, 4))
    rung = Pool(job)
    assert rung.base() == 2.0
    assert rung.knows_scaling()
    assert rung.measured_ratio(4) == pytest.approx(0.9)  # measured, not from beta
    assert rung.beta == pytest.approx((1.2 + 3.6 ** (1 / 3)) / 2)
    recorded(rung, "b", w1=(1.0, 2), w2=(1.0, 4))
    assert rung.base() == 1.0 and rung.beta == pytest.approx(2.0)
    assert rung.total() is None

"""No commit drops a result that Tune's state in the run's storage has not, and Tune is asked to save in time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.hosting.result_replay import ReportedResults
from fluidtune.tune.snapshot_pace import MOST_RESULTS, SnapshotPace


class Driver:
    """A trial whose every iteration is committed, and a driver that may die after each. ``seconds``: of an iteration.

    ``storing``: how long the storage takes for a state that is written now; None: it refuses that. Tune saves nothing
    by itself, and brings no state there before the one before is done.
    """

    def __init__(self, seconds: float, storing: Callable[[float], float | None]):
        self.now, self.delivered, self.saves = 0.0, 0, 0
        self.in_storage = 0
        self._seconds, self._storing = seconds, storing
        self._on_its_way: tuple[float, int, Callable[[bool], None]] | None = None
        self.pace = SnapshotPace(lambda: {"trial": self.delivered}, lambda: self.now)
        totals = {"_time_total": 0.0, "_timesteps_total": None, "_episodes_total": None}
        self.trainable: Any = SimpleNamespace(iteration=0, **totals)
        self.reports = ReportedResults(0, "mark")
        self.reports.trainable = self.trainable

    def iterate(self) -> ReportedResults:
        """One iteration. Returns what a restored run's worker has, which can go on from the commit."""
        self.reports.drop_stored(self.pace.results_stored("trial"))
        self.now += self._seconds
        self.trainable.iteration += 1
        self.reports.keep_result({"loss": self.trainable.iteration})
        commit: Any = SimpleNamespace(fingerprint="mark", note=self.reports.note(), iteration=self.trainable.iteration)
        if self._on_its_way is not None and self._on_its_way[0] <= self.now:
            self._bring()
        after = ReportedResults(self.in_storage, "mark")
        assert after.go_on_from(commit) is commit
        self.delivered = self.trainable.iteration
        self.pace.result_reported("trial")
        if self.pace.is_due():
            self.save()
        return after

    def save(self) -> None:
        """Tune saves its state."""
        if self._on_its_way is not None:
            self.now = max(self.now, self._on_its_way[0])
            self._bring()
        self.saves += 1
        stored, seconds = self.pace.state_written(), self._storing(self.now)
        if seconds is None:
            stored(False)
        else:
            self._on_its_way = self.now + seconds, self.delivered, stored

    def _bring(self) -> None:
        assert self._on_its_way is not None
        _, self.in_storage, stored = self._on_its_way
        self._on_its_way = None
        stored(True)


@pytest.mark.parametrize("storing", [0.1, 9.0, 60.0, 300.0])
@pytest.mark.parametrize("seconds", [0.015, 1.0, 40.0])
def test_a_commit_has_each_result_that_tunes_state_has_not(seconds: float, storing: float) -> None:
    """Seen: after the driver's death a trial began anew where the storage took more than 45 s for Tune's state."""
    driver = Driver(seconds, lambda now: storing)
    for _ in range(3000):
        driver.iterate()
    assert driver.saves < 3000 * seconds / 40 + 3000 / 500
    assert len(driver.reports.note().results) <= 2 * MOST_RESULTS + storing / seconds


def test_a_storage_that_takes_no_state_for_an_hour_costs_nothing() -> None:
    driver = Driver(1.0, lambda now: None if 100 < now < 3700 else 1.0)
    for _ in range(4000):
        driver.iterate()
    assert driver.in_storage > 3900
    assert len(driver.reports.note().results) < 100


@pytest.mark.parametrize("age", [0, 5, 15])
def test_a_trial_that_goes_back_keeps_what_a_later_state_has_not(age: int) -> None:
    """It gets another trial's state of iteration 10, where Tune's state in the storage has 20 results of it.

    ``age``: iterations after which Tune saves. The state is in the storage ten iterations later.
    """
    driver = Driver(1.0, lambda now: 10.0)
    for _ in range(20):
        driver.iterate()
    driver.save()
    for _ in range(11):
        driver.iterate()
    assert driver.in_storage == 20
    driver.delivered = driver.trainable.iteration = 10
    for _ in range(age):
        driver.iterate()
    driver.save()
    for _ in range(30):
        driver.iterate()
    assert driver.in_storage == 10 + age


def test_news_is_saved_at_once_but_for_a_twentieth_of_the_time_at_most() -> None:
    now = [-1e6]
    pace = SnapshotPace(lambda: {}, lambda: now[0])
    now[0] = 0.0
    assert not pace.is_due(), "no trial has commits"
    pace.news_came()
    assert pace.is_due()
    stored = pace.state_written()
    pace.saved(1.0)
    pace.news_came()
    assert not pace.is_due(), "a state is on its way, for which Tune would wait, and no trial would go on"
    stored(True)
    now[0] = 18.0
    assert not pace.is_due()
    now[0] = 19.0
    assert pace.is_due() and not pace.is_due(pausing=True)

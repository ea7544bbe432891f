"""The lies that no check finds, as docs/arbiter.md says: who makes this test fail changes that page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from themis_bridge import messages as m
from themis_bridge.app_record import MOST_SLOWDOWN, AppRecord

#: All the work of an app, as seconds on the two GPUs that it can use.
WORK = 6000.0


def test_a_part_of_the_work_left_that_is_also_left_out_of_the_whole_is_not_found() -> None:
    for part, of_all, found in ((1.0, False, False), (0.5, True, True), (0.5, False, False)):
        book = AppRecord("s", 0.0, 0.0)
        for minute in range(100):
            done = 60.0 * minute
            left = max(1.0, part * WORK - done) if of_all else part * (WORK - done)
            whole = part * WORK if of_all else done + left
            report = m.Report(1.0, 2, left=left, whole=whole, leases=(1, 2), ends=left, fair=whole, demand=2)
            book.take_report(report, [1, 2], 2, done, 1.0)
            book.serve(60.0, 2)
        assert (book.leave()[0] > 1.0) == found


def test_a_placement_is_not_judged_by_reports_whose_claims_change_each_time() -> None:
    for change, found in ((1.0, True), (1.011, False)):
        book = AppRecord("s", 0.0, 0.0)
        for minute in range(60):
            left, whole = WORK - 60.0 * minute, WORK * (change if minute % 2 else 1.0)
            # On one of the two GPUs it says that it takes eight times as long as on both.
            report = m.Report(1.0, 2, left=left, whole=whole, leases=(1,), ends=8 * left, fair=whole, demand=2)
            book.take_report(report, [1], 2, 60.0 * minute, 1.0)
            book.serve(60.0, 1)
        assert (book.distrust > 1.0) == found


@pytest.mark.parametrize("ends", [1e9, 0.0])
def test_an_end_that_is_always_as_far_is_not_found_and_gains_no_more_than_a_slow_placement(ends: float) -> None:
    book, honest = AppRecord("s", 0.0, 0.0), AppRecord("s", 0.0, 0.0)
    for minute in range(100):
        done = 60.0 * minute
        truth = m.Report(1.0, 2, left=WORK - done, whole=WORK, leases=(1, 2), ends=WORK - done, fair=WORK, demand=2)
        for record, told in ((honest, truth), (book, replace(truth, ends=ends))):
            record.take_report(told, [1, 2], 2, done, 2.0)
            record.serve(60.0, 2)
        assert honest.rho == pytest.approx(0.5, rel=0.01)
        assert book.rho is not None and book.rho <= MOST_SLOWDOWN * honest.rho
    assert book.leave()[0] == 1.0

"""The lies that no check finds, as docs/arbiter.md says: who makes this test fail changes that page."""

from __future__ import annotations

from tests.themis.cluster import claim
from themis_bridge.app_record import AppRecord
from themis_bridge.locality import Gpu

#: All the work of an app that can use two GPUs, GPU seconds.
WORK = 12000.0


def test_a_part_of_the_work_left_that_is_also_left_out_of_the_whole_is_not_found() -> None:
    here = {1: Gpu("g", "m"), 2: Gpu("h", "m")}
    for part, of_all, found in ((1.0, False, False), (0.5, True, True), (0.5, False, False)):
        book = AppRecord("s", 0.0, 0.0)
        for minute in range(100):
            done = 120.0 * minute
            left = max(1.0, part * WORK - done) if of_all else part * (WORK - done)
            whole = part * WORK if of_all else done + left
            book.take_report(claim(left, max(0.0, whole - left)), here, 2, 60.0 * minute, 1.0)
            book.serve(60.0, 2)
        assert (book.leave()[0] > 1.0) == found


def test_a_placement_is_not_judged_by_reports_whose_claims_change_each_time() -> None:
    apart = {1: Gpu("g", "m"), 2: Gpu("h", "n")}
    for change, found in ((1.0, True), (1.011, False)):
        book = AppRecord("s", 0.0, 0.0)
        for minute in range(60):
            done = 120.0 * minute
            whole = WORK * (change if minute % 2 else 1.0)
            # It says that on two machines it is half as fast.
            book.take_report(claim(WORK - done, whole - (WORK - done), across=2.0), apart, 2, 60.0 * minute, 1.0)
            book.serve(60.0, 2)
        assert (book.distrust > 1.0) == found

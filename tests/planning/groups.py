"""Shared by the tests of planning: Hypothesis strategies for TrialGroups, and an audit of a schedule.

The audit repeats nothing of `fluidtune.planning.check`: it looks at every moment between two changes and
counts, so that the two can disagree.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from math import isclose

from hypothesis import strategies as st

from fluidtune.planning import Schedule, TrialLoad, runtime

Group = tuple[list[TrialLoad], int, int, int]


@st.composite
def groups(draw: st.DrawFn, overheads: bool = True, trials: int = 14, devices: int = 9) -> Group:
    """(loads, n, c, d): ties, zeros and long tails included; alpha up to 3 goes beyond the paper's range."""
    n, c, d = draw(st.integers(1, devices)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    heights = st.one_of(
        st.just(0.0),
        st.integers(1, 5).map(float),
        st.floats(0.01, 1e4),
        st.floats(0.01, 10).map(lambda x: 3.0**x),
    )
    alphas = st.one_of(st.just(1.0), st.floats(1, 3)) if overheads else st.just(1.0)
    betas = st.one_of(st.just(1.0), st.floats(1, 1.6)) if overheads else st.just(1.0)
    rows = draw(st.lists(st.tuples(heights, alphas, betas), max_size=trials))
    return [TrialLoad(f"t{i}", *row) for i, row in enumerate(rows)], n, c, d


def audit(schedule: Schedule, group: Group) -> None:
    """Assert that no device is over-committed at any moment, widths are legal, and all work is done once."""
    loads, n, c, d = group
    by_id = {load.trial_id: load for load in loads}
    work: dict[str, float] = defaultdict(float)
    for segment in schedule.segments:
        width = Fraction(segment.width)
        assert Fraction(1, c) <= width <= d, segment
        assert width.denominator == 1 or width.numerator == 1, segment
        assert len(set(segment.devices)) == len(segment.devices) == max(1, width), segment
        assert set(segment.devices) <= set(range(n)), segment
        assert 0 <= segment.start <= segment.end <= schedule.makespan, segment
        work[segment.trial_id] += (segment.end - segment.start) / runtime(by_id[segment.trial_id], width)
    moments = sorted({time for segment in schedule.segments for time in (segment.start, segment.end)})
    for moment in moments:  # everything that runs just after it
        share: dict[int, Fraction] = defaultdict(Fraction)
        running: set[str] = set()
        count: dict[int, int] = defaultdict(int)
        for segment in schedule.segments:
            if segment.start <= moment < segment.end:
                assert segment.trial_id not in running, f"{segment.trial_id} runs twice at {moment}"
                running.add(segment.trial_id)
                for device in segment.devices:
                    share[device] += min(Fraction(segment.width), Fraction(1))
                    count[device] += 1
        assert all(total <= 1 for total in share.values()), f"over-committed at {moment}"
        assert all(held <= c for held in count.values()), f"packed beyond c at {moment}"
    for load in loads:
        if load.height == 0:
            assert load.trial_id not in work
        else:
            assert isclose(work[load.trial_id], 1, abs_tol=1e-7), load

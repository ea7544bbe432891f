"""Loads for the tests of planning: equal ones, and any TrialGroup."""

from __future__ import annotations

from hypothesis import strategies as st

from fluidtune.planning import TrialLoad

Group = tuple[list[TrialLoad], int, int, int]


def equal(count: int, height: float = 100.0, alpha: float = 1.0, beta: float = 1.0) -> list[TrialLoad]:
    return [TrialLoad(f"t{i}", height, alpha, beta) for i in range(count)]


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

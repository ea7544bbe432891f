"""What a tenant sends becomes plain values of bounded size, or is refused."""

from __future__ import annotations

from dataclasses import astuple, fields, replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis_bridge import messages as m
from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobKind
from themis_bridge.plain import MOST_CHARACTERS, MOST_NUMBER, MOST_WHOLE


class Name(str):
    """A str of the tenant's own kind."""


KIND = JobKind(2, 3, 30.0, 10.0)
REPORT = m.Report(((KIND,),), 5.0, 6, 8, (1.1, 1.3))
HEARD = m.Heartbeat("a", "a/1", 1, REPORT, "digest", (("m-0", 1),), "anna", "ff", 2, {"CPU": 1.0})


def parts(value) -> list:
    return [part for each in value for part in parts(each)] if isinstance(value, tuple) else [value]


def test_each_field_of_a_message_is_made_plain() -> None:
    kind = replace(KIND, work=np.float64(30.0), longest=np.float64(10.0))
    strange = m.Heartbeat(Name("a"), Name("a/1"), 1, replace(REPORT, phases=((kind,),), done=5), Name("digest"))
    told = m.plain_heartbeat(strange)
    assert told == m.Heartbeat("a", "a/1", 1, REPORT, "digest") and m.plain_heartbeat(HEARD) == HEARD
    assert {type(each) for each in parts(astuple(told)[:-1])} == {str, int, float}


JUNK = st.one_of(
    st.sampled_from([None, True, 10**5000, 1 << 70, -1, 1.5, float("nan"), float("inf"), "2", "a" * 10**4, "\ud800"]),
    st.sampled_from([Fraction(1), Decimal(1), np.float32(1), np.int64(2), [], (), (1.0,), ((5,),), ((KIND,) * 2000,)]),
    st.dictionaries(st.sampled_from(["x", 4, "\ud800"]), st.sampled_from(["4", -1.0, float("nan"), 1e300, 1.0])),
    st.tuples(st.text(), st.integers()).map(lambda pair: (pair,)),
    st.floats() | st.integers() | st.text(),
)


@given(st.sampled_from([(HEARD, ()), (REPORT, ("report",)), (KIND, ("report", "phases"))]), st.data(), JUNK)
def test_whatever_a_field_is_it_is_plain_and_bounded_or_refused(where, data, junk) -> None:
    owner, path = where
    changed = replace(owner, **{data.draw(st.sampled_from([each.name for each in fields(owner)])): junk})
    report = changed if path == ("report",) else replace(REPORT, phases=((changed,),)) if path else None
    try:
        told = m.plain_heartbeat(replace(HEARD, report=report) if path else changed)
    except ThemisError as error:
        assert len(str(error)) < 300
        return
    for part in parts((*astuple(told)[:-1], *told.bundle.items())):
        assert type(part) in (str, int, float, type(None))
        assert len(part.encode()) <= 4 * MOST_CHARACTERS if isinstance(part, str) else abs(part or 0) <= MOST_WHOLE


@pytest.mark.parametrize(
    "heard",
    [
        *(replace(HEARD, report=replace(REPORT, done=value)) for value in (-1.0, 2 * MOST_NUMBER, float("nan"))),
        *(replace(HEARD, report=replace(REPORT, across=value)) for value in ((1.0,), (0.9, 1.0), (1.0, "2"))),
        *(replace(HEARD, report=replace(REPORT, phases=value)) for value in (((KIND,) * 2000,), ((),) * 2000)),
        replace(HEARD, report=replace(REPORT, phases=((replace(KIND, longest=31.0),),))),
        replace(HEARD, left=(("m" * 10**6, 1),)),
        replace(HEARD, bundle={f"r{number}": 0.0 for number in range(1000)}),
        *(replace(HEARD, together=value) for value in (0, 3, 2048)),
        m.AppLeft("a", "a/1"),
        None,
    ],
)
def test_what_no_agent_can_send_is_refused(heard) -> None:
    with pytest.raises(ThemisError):
        m.plain_heartbeat(heard)

"""What a tenant sends becomes plain values of bounded size, or is refused."""

from __future__ import annotations

from dataclasses import astuple, replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from themis_bridge import messages as m
from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobKind
from themis_bridge.plain import MOST_NUMBER, shown


class Name(str):
    """A str of the tenant's own kind."""


KIND = JobKind(2, 3, 30.0, 10.0)
REPORT = m.Report(((KIND,),), 5.0, 6, 8, (1.1, 1.3))
HEARD = m.Heard("a", "a/1", 1, REPORT, "digest", (("m-0", 1),), "anna", "ff", 2, {"CPU": 1.0})


def parts(value) -> list:
    return [part for each in value for part in parts(each)] if isinstance(value, tuple) else [value]


def test_each_field_of_a_message_is_made_plain() -> None:
    kind = replace(KIND, work=np.float64(30.0), longest=np.float64(10.0))
    strange = m.Heard(Name("a"), Name("a/1"), 1, replace(REPORT, phases=((kind,),), done=5), Name("digest"))
    told = m.plain_heard(strange)
    assert told == m.Heard("a", "a/1", 1, REPORT, "digest") and m.plain_heard(HEARD) == HEARD
    assert {type(each) for each in parts(astuple(told)[:-1])} == {str, int, float}


NUMBERS = [MOST_NUMBER * 2, float("nan"), float("inf"), -1.0, True, "1", None, Fraction(1), Decimal(1), np.float32(1)]


@pytest.mark.parametrize(
    "heard",
    [
        *(replace(HEARD, report=replace(REPORT, done=value)) for value in NUMBERS),
        *(
            replace(HEARD, report=replace(REPORT, phases=((replace(KIND, **{name: value}),),)))
            for name in ("work", "longest")
            for value in NUMBERS
        ),
        *(
            replace(HEARD, report=replace(REPORT, **{name: value}))
            for name in ("peak", "most", "endless")
            for value in (-1, 10**5000, 1.5, np.int64(2), "2", 10**9 if name != "most" else 1 << 70)
        ),
        *(replace(HEARD, report=replace(REPORT, across=value)) for value in (None, (1.0,), (0.9, 1.0), (1.0, "2"))),
        *(
            replace(HEARD, report=replace(REPORT, phases=value))
            for value in (
                None,
                [],
                (KIND,),
                ((5,),),
                ((KIND,) * 2000,),
                ((),) * 2000,
                ((replace(KIND, longest=31.0),),),
            )
        ),
        replace(HEARD, report=replace(REPORT, phases=((replace(KIND, max_gpus=1 << 40),),))),
        replace(HEARD, report=None),
        replace(HEARD, number=1 << 70),
        replace(HEARD, known=5),
        *(replace(HEARD, left=value) for value in (None, "ab", (("m-0",),), ((5, 1),), (("m" * 10**6, 1),))),
        replace(HEARD, left=(("\ud800", 1),)),
        *(
            replace(HEARD, bundle={"CPU": 1.0, **more})
            for more in ({"x": "4"}, {4: 4.0}, {"x": -1.0}, {"x": float("nan")}, {"\ud800": 0.0}, {"x": 1e300})
        ),
        replace(HEARD, bundle=["CPU"]),
        replace(HEARD, bundle={f"r{number}": 0.0 for number in range(1000)}),
        *(replace(HEARD, together=value) for value in (0, "2", 1 << 20_000, 2048)),
        *(replace(HEARD, **{name: value}) for name in ("app", "session", "user", "life") for value in (5, "\ud800")),
        m.AppLeft("a", "a/1"),
        None,
    ],
)
def test_what_no_agent_can_send_is_refused(heard) -> None:
    with pytest.raises(ThemisError):
        m.plain_heard(heard)


def test_what_people_are_shown_is_short() -> None:
    assert shown(10**5000) == "a int" or len(shown(10**5000)) < 100
    assert len(shown("a" * 10**6)) < 100 and len(shown(list(range(10**6)))) < 100

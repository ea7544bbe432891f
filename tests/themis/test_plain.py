"""What a tenant sends becomes plain values of bounded size, whatever fields a message has."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from themis_bridge import messages as m
from themis_bridge.errors import ThemisError
from themis_bridge.plain import MOST_NUMBER, plain, shown


class Name(str):
    """A str of the tenant's own kind."""


@pytest.mark.parametrize("kind", [*m.APP_EVENTS, m.Report])
def test_each_field_of_a_message_is_made_plain(kind) -> None:
    values = {
        "str": Name("a"),
        "int": 1,
        "float": np.float64(1.0),
        "float | None": np.float64(1.0),
        "bool": True,
        "tuple[int, ...]": (1, 2),
        "tuple[int, int] | None": (1, 2),
        "Report": None,
        "Bid": None,
    }
    told = plain(kind(**{each.name: values[str(each.type)] for each in fields(kind)}), kind, but=("report", "bid"))
    assert type(told) is kind
    assert {type(getattr(told, each.name)) for each in fields(kind)} <= {str, int, float, bool, tuple, type(None)}


@pytest.mark.parametrize(
    "value", [MOST_NUMBER * 2, float("nan"), float("inf"), True, "1", None, pytest.param(10**5000, id="long")]
)
def test_a_number_is_finite_and_bounded(value) -> None:
    with pytest.raises(ThemisError, match=r"rho of a Report is .*: expected a finite number"):
        plain(m.Report(value, 1), m.Report)


def test_what_people_are_shown_is_short() -> None:
    assert shown(10**5000) == "a int" or len(shown(10**5000)) < 100
    assert len(shown("a" * 10**6)) < 100 and len(shown(list(range(10**6)))) < 100


def test_all_that_an_app_can_send_is_listed() -> None:
    assert set(m.AppEvent.__subclasses__()) == {*m.APP_EVENTS}

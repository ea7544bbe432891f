"""Profiles: the seconds of a batch by its size."""

from __future__ import annotations

import logging
import math

import pytest

from symphony_serve.errors import ServeError
from symphony_serve.profiles import Profile, check_slo


def test_a_linear_profile():
    profile = Profile.linear(1.053, 5.072, 16)
    assert profile.max_batch == 16
    assert profile.seconds(1) == pytest.approx(6.125)
    assert profile.seconds(16) == pytest.approx(21.92)
    assert profile.seconds(17) == math.inf


def test_the_largest_batch_within_a_time():
    profile = Profile.linear(1.0, 5.0, 8)
    assert [profile.largest(seconds) for seconds in (-1.0, 0.0, 5.9, 6.0, 9.5, 13.0, math.inf)] == [0, 0, 0, 1, 4, 8, 8]


def test_a_table_that_falls_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        profile = Profile.from_seconds([3.0, 2.0, 5.0, 4.0])
    assert [profile.seconds(size) for size in (1, 2, 3, 4)] == [3.0, 3.0, 5.0, 5.0]
    assert "2 of its 4 sizes" in caplog.text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Profile.linear(-1.0, 5.0, 4), "alpha is -1.0"),
        (lambda: Profile.linear(1.0, -5.0, 4), "beta is -5.0"),
        (lambda: Profile.linear(math.nan, 5.0, 4), "alpha is nan"),
        (lambda: Profile.linear(0.0, 0.0, 4), "takes 0.0 s"),
        (lambda: Profile.linear(1.0, 5.0, 0), "no entry"),
        (lambda: Profile.from_seconds([]), "no entry"),
        (lambda: Profile.from_seconds([1.0, math.inf]), "a batch of 2 takes inf s"),
        (lambda: check_slo("m", Profile.linear(1.0, 5.0, 4), 6.5, delay=1.0), "an SLO of at least 7.0 s"),
        (lambda: check_slo("m", Profile.linear(1.0, 5.0, 4), math.nan), "SLO of nan s"),
        (lambda: check_slo("m", Profile.linear(1.0, 5.0, 4), math.inf), "SLO of inf s, expected finite seconds"),
    ],
)
def test_what_is_refused_names_the_value(make, said):
    with pytest.raises(ServeError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)

"""Devices whose hardware has failed are not used again: a job's own devices, on a stand-in for Ray."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.test_on_demand_devices import Cluster, OnDemandCase

Both = Callable[..., OnDemandCase]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    """A function that returns two devices that are there."""

    def made(numbered: bool = False, share: float = 1.0) -> OnDemandCase:
        case = OnDemandCase(Cluster(monkeypatch), share)
        case.source.numbered = numbered
        for device in (0, 1):
            case.bring(device)
        case.source.poll()
        return case

    return made


def test_a_broken_device_is_gone_once_for_its_reason_and_stays_reserved(both: Both) -> None:
    case = both()
    assert case.source.give_up(0, "fell off the bus") and case.source.give_up(0, "said again")
    assert set(case.source.nodes) == {1}
    assert case.source.poll() == ({}, [0]) and case.source.reasons == {0: "fell off the bus"}
    assert case.source.poll() == ({}, []) and case.source.reasons == {}
    assert case.held() == 2, "nobody else gets it either"


def test_the_last_device_is_not_given_up(both: Both) -> None:
    case = both()
    assert case.source.give_up(1, "broken") and not case.source.give_up(0, "broken")
    assert set(case.source.nodes) == {0}
    assert not both(share=2.0).source.give_up(0, "broken"), "a trial needs both"


@pytest.mark.parametrize("numbered", [True, False], ids=["leased", "own"])
def test_a_broken_device_that_comes_again_is_another_one_unless_numbers_stay(both: Both, numbered: bool) -> None:
    case = both(numbered)
    case.source.give_up(0, "broken")
    case.source.poll()
    case.take_away(0)
    assert case.source.poll() == ({}, []), "that it is gone was said before"
    case.bring(0)
    came, gone = case.source.poll()
    assert (set(came), gone, set(case.source.nodes)) == ((set(), [], {1}) if numbered else ({0}, [], {0, 1}))

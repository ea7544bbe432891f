"""Devices whose hardware has failed are not used again: around a job's own devices, on a stand-in for Ray."""

from __future__ import annotations

import pytest

from fluidtune.cluster.devices.sound_devices import SoundDevices
from tests.cluster.test_reservation import ReservationCase
from tests.contracts.device_sources import DeviceSourceContract


class SoundCase(ReservationCase):
    """Two devices, around which nothing is broken at first. ``numbered``: see `SoundDevices`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, numbered: bool = False, needed: int = 1) -> None:
        super().__init__(monkeypatch)
        self.broken: set[int] = set()
        self.sound = SoundDevices(self.source, self.broken, numbered, lambda: 2.0, needed)
        self.source = self.sound  # type: ignore[assignment]


class TestSoundDevices(DeviceSourceContract):
    @pytest.fixture
    def case(self, monkeypatch: pytest.MonkeyPatch) -> SoundCase:
        return SoundCase(monkeypatch)


def both(monkeypatch: pytest.MonkeyPatch, numbered: bool = False, needed: int = 1) -> SoundCase:
    case = SoundCase(monkeypatch, numbered, needed)
    for device in (0, 1):
        case.bring(device)
    case.sound.poll()
    return case


def test_a_broken_device_is_gone_once_for_its_reason_and_stays_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    case = both(monkeypatch)
    assert case.sound.give_up(0, "fell off the bus") and case.sound.give_up(0, "said again")
    assert set(case.sound.nodes) == {1}
    assert case.sound.poll() == ({}, [0]) and case.sound.reasons == {0: "fell off the bus"}
    assert case.sound.poll() == ({}, []) and case.sound.reasons == {}
    assert case.held() == 2, "nobody else gets it either"


def test_the_last_device_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    case = both(monkeypatch)
    assert case.sound.give_up(1, "broken") and not case.sound.give_up(0, "broken")
    assert set(case.sound.nodes) == {0}
    assert not both(monkeypatch, needed=2).sound.give_up(0, "broken"), "a trial needs both"


@pytest.mark.parametrize("numbered", [True, False], ids=["leased", "own"])
def test_a_broken_device_that_comes_again_is_another_one_unless_numbers_stay(monkeypatch, numbered: bool) -> None:
    case = both(monkeypatch, numbered)
    case.sound.give_up(0, "broken")
    case.sound.poll()
    case.take_away(0)
    assert case.sound.poll() == ({}, []), "that it is gone was said before"
    case.bring(0)
    came, gone = case.sound.poll()
    assert (set(came), gone, set(case.sound.nodes)) == ((set(), [], {1}) if numbered else ({0}, [], {0, 1}))

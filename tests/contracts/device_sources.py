"""The contract of a `DeviceSource`, as tests. The test file of a source is a fixture and an import:

from tests.contracts.device_sources import DeviceSourceCase, DeviceSourceContract

class MyCase(DeviceSourceCase): ...

class TestMySource(DeviceSourceContract):
    @pytest.fixture
    def case(self) -> MyCase:
        return MyCase()
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import pytest

from fluidtune.cluster.devices.device_source import DeviceSource


class DeviceSourceCase(ABC):
    """A source of at least two devices, and the power over what happens to them. No device is there at first.

    The devices are brought in the order of their numbers: 0, then 1. Nothing changes for the source until it polls.
    """

    #: The source to test, not polled so far.
    source: DeviceSource

    @abstractmethod
    def bring(self, device: int) -> None:
        """The device is there from now on; on another node than before, if it was there before."""

    @abstractmethod
    def take_away(self, device: int) -> None:
        """The device is lost: its node has died, or its lender has taken it back."""

    @abstractmethod
    def remove_group(self, device: int) -> None:
        """Somebody removes the device's placement group. Only a worker's failure would tell the source."""

    @abstractmethod
    def held(self) -> int:
        """How many devices are reserved for the source, whether they are there or not."""

    def warn(self, device: int) -> bool:
        """Announce that the device will be lost soon. False: such a source gets no warning."""
        return False


#: What happens, in turns: devices that come (+) and are lost (-) before a poll; those that it tells came and are gone.
HISTORIES: dict[str, list[tuple[str, list[int], list[int]]]] = {
    "each device that comes, and is lost, is told once": [
        ("", [], []),
        ("+0", [0], []),
        ("+1", [1], []),
        ("-0", [], [0]),
    ],
    "one that comes back has its old number": [("+0 +1", [0, 1], []), ("-0", [], [0]), ("+0", [0], [])],
    "a loss and a return between two polls are both told": [("+0", [0], []), ("-0 +0", [0], [0])],
    "one that came and was lost between two polls is not told": [("+0 -0", [], [])],
}


class DeviceSourceContract:
    """Inherit it, and define the fixture ``case``."""

    @pytest.fixture
    def case(self) -> Any:
        raise NotImplementedError("define a fixture `case` that returns a DeviceSourceCase")

    def _bring(self, case: DeviceSourceCase, *devices: int) -> None:
        """These devices come, and the source polls."""
        for device in devices:
            case.bring(device)
        case.source.poll()

    @pytest.mark.parametrize("history", HISTORIES)
    def test_what_a_poll_tells(self, history: str, case: DeviceSourceCase) -> None:
        there: set[int] = set()
        for turn in HISTORIES[history]:
            for word in turn[0].split():
                (case.bring if word[0] == "+" else case.take_away)(int(word[1:]))
            came, gone = case.source.poll()
            assert (list(came), gone) == turn[1:] and all(came.values())
            there = (there - {*gone}) | {*came}
            assert case.source.nodes == {**case.source.nodes, **came} and set(case.source.nodes) == there
            assert case.source.poll() == ({}, []) and case.source.leaving() == []

    def test_each_device_has_a_group_of_its_own(self, case: DeviceSourceCase) -> None:
        self._bring(case, 0, 1)
        assert case.source.group(0) == case.source.group(0) != case.source.group(1)

    def test_a_device_whose_group_was_removed_is_gone(self, case: DeviceSourceCase) -> None:
        self._bring(case, 0, 1)
        group = case.source.group(1)
        case.remove_group(1)
        case.source.revoked(1, group)
        assert case.source.poll() == ({}, [1])
        assert set(case.source.nodes) == {0}

    def test_a_removed_group_of_a_device_that_is_not_there_changes_nothing(self, case: DeviceSourceCase) -> None:
        case.source.revoked(0, None)
        case.source.revoked(99, None)
        case.bring(0)
        assert list(case.source.poll()[0]) == [0]

    def test_the_removed_group_of_an_earlier_time_does_not_take_the_device_away(self, case: DeviceSourceCase) -> None:
        self._bring(case, 0)
        group = case.source.group(0)
        case.take_away(0)
        case.source.poll()
        self._bring(case, 0)
        if case.source.group(0) == group:
            return  # a source whose devices keep their groups: the group is not removed
        case.source.revoked(0, group)
        assert case.source.poll() == ({}, []) and 0 in case.source.nodes

    def test_a_warning_is_told_once_and_before_the_loss(self, case: DeviceSourceCase) -> None:
        self._bring(case, 0)
        if not case.warn(0):
            assert case.source.leaving() == []
            return
        case.source.poll()
        assert case.source.leaving() == [0] and 0 in case.source.nodes
        assert case.source.leaving() == []
        case.take_away(0)
        assert case.source.poll() == ({}, [0])
        assert case.source.leaving() == []

    def test_a_poll_that_may_wait_ends_with_the_first_device(self, case: DeviceSourceCase) -> None:
        assert case.source.poll(wait_s=0.2) == ({}, [])
        case.bring(0)
        started = time.monotonic()
        assert list(case.source.poll(wait_s=20.0)[0]) == [0]
        assert time.monotonic() - started < 10.0

    def test_closing_gives_every_device_back(self, case: DeviceSourceCase) -> None:
        self._bring(case, 0)
        assert case.held() >= 1
        case.source.close()
        assert case.held() == 0
        assert case.source.nodes == {}

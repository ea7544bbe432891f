"""A trial on emulated devices: its leader, which counts its followers and its neighbours, and a follower.

A follower computes nothing: it holds its device. Leader and followers find each other on the job's board, as a group of
processes. A resize is real in all but the training: processes come and go, and one that dies is noticed. There are no
commits: a trial that lost its leader goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.cluster.emulated.paced_trainable import LOOK_S, Emulation, use_host
from fluidtune.elastic import LeaderSession
from fluidtune.group_facts import GroupFacts
from fluidtune.profiles import DEVICES_PER_NODE


class EmulatedSession(LeaderSession):
    """A leader: a `LeaderSession` without commits, and the `EmulatedHost` that the trial's iterations ask
    until it is closed.

    ``device``: the number of its emulated device.
    """

    def __init__(self, device: int, emulation: Emulation):
        self._device = device
        self._board = OccupancyBoard(emulation.board, emulation.owner)
        #: The number of its group: that of no other session.
        self._group = int.from_bytes(os.urandom(4), "little") | 1
        self._leads = emulation.profile.widest > 1
        #: The devices of the group at the last look.
        self._devices = [device]
        #: The width in the last iteration; 0: it changed meanwhile.
        self._width = 1
        self._board.enter(device, self._group)
        use_host(self)

    # -- the host's side

    def facts(self) -> GroupFacts:
        address = (self._device, self._group) if self._leads else None
        return GroupFacts(address=address, calls_modules=self._leads, width=self._width)

    def leave(self) -> None:
        """Let go of the followers, and of those that come too late: they see that the group has no leader."""
        if self._leads:
            self._leads = False
            self._board.leave(self._device)
            self._board.enter(self._device)

    def close(self) -> None:
        use_host(None)
        self._leads = False
        self._board.leave(self._device)

    def boundary(self, done: int) -> None:
        """Nothing to do: there is no commit."""

    # -- the iteration

    def begin_iteration(self) -> None:
        self._look()
        self._width = len(self._devices)

    def placement(self) -> tuple[tuple[int, ...], int]:
        self._look()
        nodes = tuple(sorted(Counter(device // DEVICES_PER_NODE for device in self._devices).values()))
        return nodes, max(1, self._board.count(self._device))

    def _look(self) -> None:
        """Take in the followers that have come, and forget those that have gone."""
        others = self._board.devices_of(self._group) if self._leads else []
        now = sorted({self._device, *others})  # also where the board was removed
        if now != self._devices:
            self._devices, self._width = now, 0


class EmulatedFollower:
    """Holds its device from its attachment on, until the leader lets go of it. For the arguments see `EmulatedSession`.

    The leader counts it when it looks for the next time.
    """

    def __init__(self, device: int, emulation: Emulation):
        self._device = device
        self._board = OccupancyBoard(emulation.board, emulation.owner)
        #: The leader's device, and the number of its group.
        self._address = -1, 0

    def attach(self, address: Any) -> None:
        """Raises OSError if there is no leader at this address."""
        self._address = address
        self._board.enter(self._device, address[1])
        if not self._has_leader():
            raise ConnectionError("the leader has ended")

    def run(self) -> None:
        """Hold the device until the leader has let go of it, or is dead."""
        while self._has_leader():
            time.sleep(LOOK_S)

    def _has_leader(self) -> bool:
        device, group = self._address
        return device in self._board.devices_of(group)

    def close(self) -> None:
        self._board.leave(self._device)

"""A trial's side of its device: it asks to be admitted, passes the gate, and tells the lane service what changes.

    with LaneClient("gpu-0", "trial-7", capacity=16 << 30, policy="FAIR") as lane:
        lane.admit()                            # need unknown: runs alone until `need` is told
        model = build()
        for batch in data:
            try:
                with lane.iteration():
                    step(model, batch)
            except StaleToken:                  # told to leave: nothing of this iteration ran
                commit(model); del model
                lane.leave()
                lane.admit()                    # waits until there is room again
                model = build()

The service may die at any time. Iterations go on without it, and the next call that needs a service starts one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from salus_share import service
from salus_share.errors import Refused, SalusError, ServiceLost, StaleToken
from salus_share.gate import Gate
from salus_share.messages import Need
from salus_share.seat_table import SeatTable, home

#: How often a request is sent, if the service dies before it answers.
TRIES = 5


class LaneClient:
    """One trial at one device. Not for several threads at once; a process may hold several.

    ``device``: a name, the same for all trials of one device of this node. ``capacity``: the bytes that its trials may
    use together. ``policy``: as in `salus_share.policy`. Capacity and policy must be the same for all of its trials.
    ``directory``: the directory of the device's seat table, if it is not the usual one.
    """

    def __init__(
        self, device: str, name: str, *, capacity: int, policy: str = "FAIR", directory: Path | None = None
    ) -> None:
        self._directory = directory or home(device)
        self._name = name
        self._capacity = capacity
        self._policy = policy
        self._link: socket.socket | None = None
        self._gate: Gate | None = None
        #: The token of the last admission; 0 before the first.
        self.token = 0

    def admit(
        self,
        need: Need | None = None,
        *,
        remaining: float | None = None,
        rung: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Wait until the trial may load its model onto the device.

        ``need`` None: it is not known. The trial then waits until it has the device alone, and has it alone until it
        calls `need`. ``remaining``: the seconds that it has left if it runs alone, None if that is not known. ``rung``:
        how often a tuner has promoted it. ``timeout``: seconds, None to wait without end. Raises Refused if the trial
        can never be admitted, SalusError for a wrong number, TimeoutError after ``timeout`` (it has left the queue).
        """
        if self._gate is not None:
            raise SalusError(f"{self._name!r} is admitted already")
        announced = {
            "do": "announce",
            "name": self._name,
            "pid": os.getpid(),
            "persistent": None if need is None else need.persistent,
            "ephemeral": None if need is None else need.ephemeral,
            "remaining": remaining,
            "rung": rung,
        }
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._gate is None:
            left = None if timeout is None else max(0.0, deadline - time.monotonic())
            told = self._ask(announced, left)
            if told["is"] != "admitted":
                raise SalusError(f"the lane service answered {told}, expected that {self._name!r} is admitted")
            table = SeatTable(self._directory)
            with table.lock():
                if table.claim(told["seat"], told["token"]):
                    self.token = told["token"]
                    self._gate = Gate(table, told["seat"], self.token)

    def iteration(self) -> AbstractContextManager[None]:
        """One iteration on the device, within which ephemeral memory may be used. See `Gate.iteration`."""
        return self._admitted().iteration()

    def need(self, need: Need) -> None:
        """Tell between two iterations what the trial turned out to need. It may be more than before, or less.

        Raises StaleToken if there is no room: commit, free the memory, `leave`, and `admit` anew, which raises Refused
        if the device will never have room. Raises SalusError within an iteration.
        """
        self._admitted()
        told = self._ask({"do": "need", "persistent": need.persistent, "ephemeral": need.ephemeral})
        if told["is"] == "pause":
            raise StaleToken(f"{self._name!r} needs {need}, and there is no room for it now")

    def progress(self, remaining: float | None, rung: int = 0) -> None:
        """Tell the seconds that the trial has left if it runs alone, and how often it was promoted."""
        self._ask({"do": "progress", "remaining": remaining, "rung": rung})

    def leave(self) -> None:
        """The trial is done with the device and has freed its memory. This works without a service too."""
        if self._gate is not None:
            self._gate.withdraw()
            self._gate = None
        self._hang_up()

    def __enter__(self) -> LaneClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.leave()

    # Talking to the service

    def _ask(self, asked: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send a request and wait for its answer. If the service dies meanwhile, ask the next one."""
        for _ in range(TRIES):
            known: bool | None = True
            if self._link is None:
                self._link = service.start(self._directory, self._capacity, self._policy)
                known = self._rejoin()
            if known is False and asked["do"] != "announce":
                raise StaleToken(f"{self._name!r} is not on this device any more; ask to be admitted again")
            told = None if known is None else self._exchange(asked, timeout)
            if told is not None:
                if told["is"] == "error":
                    raise SalusError(told["text"])
                if told["is"] == "refused":
                    raise Refused(told["reason"])
                return told
            self._hang_up()
        raise ServiceLost(f"the lane service of {self._directory.name} died {TRIES} times; see service.log there")

    def _rejoin(self) -> bool | None:
        """Name this trial to a new service. Returns whether it still has its seat, None if the service died."""
        if self.token == 0:
            return False
        told = self._exchange({"do": "rejoin", "name": self._name, "token": self.token}, None)
        return None if told is None else told["is"] == "welcome"

    def _exchange(self, asked: dict[str, Any], timeout: float | None) -> dict[str, Any] | None:
        """Send a request and wait for its answer. Returns None if the service died meanwhile."""
        link = self._link
        assert link is not None
        try:
            link.settimeout(timeout)
            link.send(json.dumps(asked).encode())
            packet = link.recv(service.PACKET)
        except TimeoutError:
            # Room that it is offered from now on is not taken, and goes back to the service.
            self._hang_up()
            raise TimeoutError(f"{self._name!r} was not admitted in time") from None
        except OSError:
            return None
        return dict(json.loads(packet)) if packet else None

    def _hang_up(self) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.close()
            self._link = None

    def _admitted(self) -> Gate:
        if self._gate is None:
            raise SalusError(f"{self._name!r} is not admitted; call `admit` first")
        return self._gate

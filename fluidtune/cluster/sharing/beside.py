"""Taking turns on a core: the trials of a search, and a service (`fluidtune serve start --beside`) beside them.

Both pass the gate of one lane (`salus_share`): a trial before each iteration but its first, a model process before each
batch. A batch that waits goes first, so it waits for one iteration at most. A trial that waits alone waits for one
batch at most. No memory is limited here. Nothing that a trial computes depends on it: where no seat is to be had, both
go on without turns, and log that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from fluidtune.cluster.sharing.lanes import RETRY_S
from salus_share.errors import SalusError
from salus_share.gate import Gate
from salus_share.policies import Hpt
from salus_share.seat_table import home

logger = logging.getLogger(__name__)

#: The name of the device: the search and the service have one core of this machine in common.
LANE = "beside-cpu"


class ServedFirst(Hpt):
    """One lane, in which a service, of rung 1, goes before trials. Trials share as under FAIR.

    The lane does not linger: when a batch ends, the next one is not at the gate yet, and a trial that waits goes in.
    """

    name = "SERVED"
    lingers = False


class Turn:
    """The place of a trial or of a service in the lane. For one thread at a time.

    ``name``: its name in the lane. ``served``: it is a service. ``directory``: of the lane's files.
    """

    def __init__(self, name: str, served: bool, directory: Path | None = None):
        self._name, self._served, self._directory = name, served, directory or home(LANE)
        self._gate: Gate | None = None
        self._retry_at = 0.0

    @contextlib.contextmanager
    def taken(self) -> Iterator[float]:
        """Run while it is this process' turn. Yields the seconds that it has waited for that."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            yield time.monotonic() - began

    def leave(self) -> None:
        """Leave the lane."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.leave()

    def _enter(self, stack: contextlib.ExitStack) -> None:
        if time.monotonic() < self._retry_at:
            return
        try:
            if self._gate is None:
                policy = f"{ServedFirst.__module__}:{ServedFirst.__name__}"
                self._gate = Gate(self._directory, self._name, policy, rung=int(self._served))
            stack.enter_context(self._gate.iteration())
        except (SalusError, OSError) as error:
            logger.warning("FluidTune: %s takes no turns with the others on its core: %s", self._name, error)
            self.leave()
            self._retry_at = time.monotonic() + RETRY_S

"""A trial's life in the driver as a state machine: an event goes in, instructions come out.

`handle` is all that a shell calls. The states and every change between them are in `life_states`; each event has one
function, called `_on_` and the name of the event: those about devices here, those about calls and their answers in
`calls`, about further workers in `resizes`, about losses and the end in `recoveries`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluidtune.trials import calls, recoveries, resizes
from fluidtune.trials import messages as m
from fluidtune.trials.life import LifeError, TrialLife


def handle(life: TrialLife, event: m.Event) -> list[m.Instruction]:
    """Change the life for one event. Returns what the shell must do, in this order.

    Where an instruction is answered by an event at once, the shell handles that event, and carries out what follows
    from it, before the next instruction.

    Raises:
        LifeError: the event cannot be true. The message tells the trial's latest events.
    """
    handler = _HANDLERS.get(type(event))
    if handler is None:
        raise LifeError(life, f"{event!r} is not an event of a trial's life; see fluidtune.trials.messages")
    life.under_way = event.outline()
    handler(life, event)
    life.story.append((life.under_way, life.place, life.crew.change, life.wish))
    life.under_way = ""
    orders, life.orders = life.orders, []
    return orders


def _on_placed(life: TrialLife, event: m.Placed) -> None:
    if life.has_place:
        recoveries.detach(life, "its device was lost")
    life.go("placed")
    life.ask_to("stay")
    life.placements += 1
    crew = life.crew
    # An elastic trial gets the workers of its other devices by a resize.
    crew.devices = event.devices if life.gang else event.devices[:1]
    crew.wanted, crew.why, crew.share, crew.width = event.devices, event.why, event.share, 1
    life.order(m.RequestLeader(crew.devices[0], crew.devices[1:], life.placements))


def _on_worker_found(life: TrialLife, event: m.WorkerFound) -> None:
    life.go("loading")
    life.crew.leader, life.done_here = event.worker, 0
    life.order(m.Load(event.worker))


def _on_leave_wanted(life: TrialLife, event: m.LeaveWanted) -> None:
    if life.over:
        raise LifeError(life, "it is to leave its devices")
    resizes.ask_to_leave(life, event.why)


_HANDLERS: Mapping[type[m.Event], Callable[[TrialLife, Any], None]] = {
    m.Placed: _on_placed,
    m.WorkerFound: _on_worker_found,
    m.LeaveWanted: _on_leave_wanted,
    **calls.HANDLERS,
    **resizes.HANDLERS,
    **recoveries.HANDLERS,
}

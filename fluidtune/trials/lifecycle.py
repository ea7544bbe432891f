"""A trial's life in the driver as a state machine: an event goes in, instructions come out.

`handle` is all that a shell calls. The states and every change between them are in `life_states`; each event has one
function of `on_event`, called `_on_` and the name of the event: those about devices here, those about calls and their
answers in `calls`, about further workers in `resizes`, about losses and the end in `recoveries`.
"""

from __future__ import annotations

from fluidtune.engine import messages as engine
from fluidtune.trials import calls, recoveries, resizes  # noqa: F401 (they register their functions)
from fluidtune.trials import messages as m
from fluidtune.trials.life import LifeError, TrialStateMachine, on_event


def handle(life: TrialStateMachine, event: m.Event | engine.Instruction) -> list[m.Instruction]:
    """Change the life for one event. Returns what the shell must do, in this order.

    Where an instruction is answered by an event at once, the shell handles that event, and carries out what follows
    from it, before the next instruction.

    Raises:
        LifeError: the event cannot be true. The message tells the trial's latest events.
    """
    life.under_way = m.outline(event)
    on_event(event, life)
    life.story.append((life.under_way, life.place, life.crew.change, life.wish))
    life.under_way = ""
    orders, life.orders = life.orders, []
    return orders


@on_event.register
def _on_start(event: engine.Start, life: TrialStateMachine) -> None:
    if life.has_place:
        recoveries.detach(life, "its device was lost")
    life.go("placed")
    life.ask_to("stay")
    life.placements += 1
    crew = life.crew
    # A trial that is no gang gets the workers of its other devices when it is loaded.
    crew.devices = event.devices if life.gang else event.devices[:1]
    crew.wanted, crew.why, crew.share = event.devices, event.why, event.share
    life.order(m.RequestLeader(crew.devices[0], crew.devices[1:], life.placements))


@on_event.register
def _on_worker_found(event: m.WorkerFound, life: TrialStateMachine) -> None:
    life.go("loading")
    life.crew.leader, life.crew.computes, life.done_here = event.worker, False, 0
    life.order(m.Load(event.worker))


@on_event.register
def _on_resumed(event: m.Resumed, life: TrialStateMachine) -> None:
    life.go("live")
    life.times_live += 1
    life.stands_at = life.seen.delivered
    life.crew.leader, life.crew.facts, life.done_here = event.worker, event.facts, event.done_here
    if len(life.crew.wanted) > len(life.crew.devices):
        resizes.begin_resize(life)
    life.order(m.TellRunning(event.worker))


@on_event.register
def _on_suspend(event: engine.Suspend, life: TrialStateMachine) -> None:
    if life.over:
        raise LifeError(life, "it is to leave its devices")
    resizes.ask_to_leave(life, event.why.words)

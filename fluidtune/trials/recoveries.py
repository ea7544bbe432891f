"""How a trial leaves its workers: because Tune let go of it, because it moves, because its leader died, or because it
failed; and what follows when it loses a follower.

After the loss of its leader the engine gives the trial other devices and it goes on there; Tune does not notice. If
there were too many such losses, the trial fails. The loss of a follower costs nothing but the follower.
"""

from __future__ import annotations

from fluidtune.engine import messages as engine
from fluidtune.engine.reasons import Reason
from fluidtune.group_facts import GroupFacts
from fluidtune.trials import messages as m
from fluidtune.trials.life import TrialStateMachine, on_event
from fluidtune.trials.resizes import call_off, discard_joining, follower_failed


def recover(life: TrialStateMachine, reason: str) -> None:
    """Take the trial off what is left of its workers, and have the engine give it new devices."""
    if life.over:
        return
    detach(life, reason)
    life.order(m.PollDevices(), m.Tell(engine.WorkerLost(life.trial), reason))


def detach(life: TrialStateMachine, reason: str) -> None:
    """Take the trial off its workers. What Tune waits for will be asked again of the next leader."""
    life.go("queued")
    life.losses.last = reason
    life.order(m.DropCalls(tuple(life.calls)))
    for call in life.calls:
        call.issued = False
    # A restore of our own that was not answered is part of getting back, not of what Tune waits for.
    while life.calls and life.calls[0].method == "restore" and not life.calls[0].wants_result:
        life.calls.popleft()
    unload(life, "short")


def fail(life: TrialStateMachine, error: Exception) -> None:
    """The trial cannot be kept alive here: tell Tune, which follows the script's failure config."""
    life.go("ended")
    calls = tuple(life.calls)
    life.order(m.Fail(calls, error), m.DropCalls(calls))
    unload(life, "short")
    life.order(m.Tell(engine.TrialEnded(life.trial, "failed")))
    life.calls.clear()


def move(life: TrialStateMachine) -> None:
    """Take the trial off its devices at its own checkpoint or commit; the engine says where it goes on."""
    life.go("moving")
    life.ask_to("stay")
    life.losses.last = "moved to another device" + (f": {life.leaves_for}" if life.leaves_for else "")
    life.leaves_for = ""
    # An elastic trial commits while its worker unloads it: until then there is nothing to go on from.
    unload(life, "long", then=True)


def unload(
    life: TrialStateMachine, patience: m.Patience, then: bool = False, keep: bool = False, waits: bool = False
) -> None:
    """Take all workers off the trial. Its followers are unloaded when their leader lets go of them, or ``waits``."""
    crew = life.crew
    leader, crew.leader = crew.leader, None
    followers, crew.followers = crew.followers, {}
    joining = call_off(life)
    facts, crew.facts = crew.facts, GroupFacts()
    if leader is not None and waits:
        life.order(*(m.Discard(worker, "its trial is paused") for worker in (*followers.values(), *joining)))
        life.order(m.Park(leader, facts, life.done_here, life.kind == "elastic"))
        return
    if leader is not None:
        life.order(m.Unload(leader, patience, then, keep))
    for worker in (*followers.values(), *joining):
        life.order(m.Unload(worker, patience))


# Events


@on_event.register
def _on_leader_died(event: m.LeaderDied, life: TrialStateMachine) -> None:
    if not life.expects(event.by):
        return
    life.crew.leader = None
    if life.losses.count_death(started=event.started, device_there=event.device_there):
        fail(life, event.error)
    else:
        recover(life, f"its worker died: {event.why}")


@on_event.register
def _on_must_reschedule(event: m.MustReschedule, life: TrialStateMachine) -> None:
    if event.by is None or life.expects(event.by):
        recover(life, event.why)


@on_event.register
def _on_release(event: engine.Release, life: TrialStateMachine) -> None:
    if life.has_place:
        detach(life, "one of its devices was lost")


@on_event.register
def _on_follower_ended(event: m.FollowerEnded, life: TrialStateMachine) -> None:
    """The leader computes what the follower has not, and the trial goes on. Nothing is repeated."""
    crew, worker, how = life.crew, event.worker, event.how
    if crew.followers.get(worker.device) is not worker:
        return
    width = crew.width
    del crew.followers[worker.device]
    if how != "died":
        life.order(m.Unload(worker, "short"))
    _go_on_without(life, worker, event.why)
    if how != "over":
        follower_failed(life, width, event.why or "a death")


def _go_on_without(life: TrialStateMachine, lost: m.Worker, why: str) -> None:
    """The engine decides anew how wide the trial shall be. A resize that is under way is called off."""
    crew = life.crew
    discard_joining(life, "a resize was called off")
    crew.note_devices()
    crew.wanted = crew.devices
    fields = {"devices": list(crew.devices), "why": Reason.WORKER_LOST.label}
    said = f": {why}" if why else ""
    life.order(
        m.Write("resized", fields, f"worker {lost.name} was lost{said}"),
        m.Tell(engine.WorkerLost(life.trial, crew.devices)),
    )


@on_event.register
def _on_unloaded(event: m.Unloaded, life: TrialStateMachine) -> None:
    if life.place == "moving":  # else the engine knows that it can run again, or Tune has let go of it
        life.go("queued")
        life.gang = life.outside.needs_several()
        life.order(m.Tell(engine.TrialEnded(life.trial, "paused"), life.losses.last), m.Announce())


@on_event.register
def _on_released(event: m.Released, life: TrialStateMachine) -> None:
    life.released_from = life.place
    life.go("released")
    life.order(m.DropCalls(tuple(life.calls)))


@on_event.register
def _on_left(event: m.Left, life: TrialStateMachine) -> None:
    life.go("ended")
    stands = life.released_from == "live" and not life.crew.computes and not any(call.issued for call in life.calls)
    unload(life, "long", keep=event.keep, waits=event.waits and event.ending == "paused" and stands)
    life.order(m.Tell(engine.TrialEnded(life.trial, event.ending)))

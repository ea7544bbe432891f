"""How a resize that the engine wants is done, and when growth ends.

A trial grows while it trains on: processes of the new devices are found, and attach themselves to the leader, which
takes each in between two calls of modules. To shrink, the driver ends the followers' processes: the leader computes
what they have not. So nobody is asked, and no iteration is waited for.
"""

from __future__ import annotations

from fluidtune.engine import messages as engine
from fluidtune.trials import messages as m
from fluidtune.trials.life import MAX_DEATHS, LifeError, TrialStateMachine, on_event


def begin_resize(life: TrialStateMachine) -> None:
    """Bring the workers of the trial to the devices ``wanted`` of its crew."""
    crew = life.crew
    new = [device for device in crew.wanted if device not in crew.devices]
    gone = [worker for device, worker in crew.followers.items() if device not in crew.wanted]
    if new and life.place != "live":
        return  # it begins when the trial is loaded
    if new and crew.facts.one_node and life.outside.on_several_nodes(crew.wanted):
        _out_of_reach(life)
        return
    if new or gone:
        assert crew.why is not None
        devices = {"devices_from": list(crew.devices), "devices_to": list(crew.wanted)}
        life.order(m.Write("resize_started", {**devices, **crew.why.as_fields()}))
    for worker in gone:
        del crew.followers[worker.device]
        life.order(m.Discard(worker, "its trial has fewer devices now"))
    crew.note_devices()
    if new:
        crew.generation += 1
        crew.awaited, crew.failed = set(new), ""
        life.turn("attaching")
        life.order(*(m.RequestJoiner(device, crew.generation) for device in new))
    else:
        _resized(life, changed=bool(gone))


def _out_of_reach(life: TrialStateMachine) -> None:
    """Nodes have come to a cluster that had one: the leader is reached from there when it is loaded anew."""
    why = "its leader is not reached from another node"
    if life.commits:
        ask_to_leave(life, f"it is to have workers on several nodes, and {why}")
        life.order(m.Write("suspend_asked", reason=life.leaves_for))
    else:
        cancel_resize(life, why)


def _resized(life: TrialStateMachine, changed: bool = True) -> None:
    """The workers are where they are wanted. Nothing was stopped for that, so that it took no time."""
    crew = life.crew
    if changed:
        life.order(m.Write("resized", {"devices": list(crew.devices)}))
    life.order(m.Tell(engine.Resized(life.trial, crew.devices)))


def ask_to_leave(life: TrialStateMachine, why: str) -> None:
    """The trial is to leave its devices at its next checkpoint or commit, for this reason, in words."""
    life.ask_to("leave")
    life.leaves_for = why


def call_off(life: TrialStateMachine) -> list[m.Worker]:
    """Forget the resize under way. Returns the workers that were to be attached."""
    crew = life.crew
    joining, crew.joining = list(crew.joining.values()), {}
    crew.awaited = set()
    life.turn("steady")
    return joining


def discard_joining(life: TrialStateMachine, why: str) -> None:
    """Call the resize off, if one is under way. Its new workers may be attached already: their processes are ended."""
    life.order(*(m.Discard(worker, why) for worker in call_off(life)))


def cancel_resize(life: TrialStateMachine, reason: str) -> None:
    """The trial stays as it is."""
    discard_joining(life, "a resize was called off")
    crew = life.crew
    crew.wanted = crew.devices
    failed = m.Write("resize_failed", {"devices": list(crew.devices)}, reason)
    life.order(failed, m.Tell(engine.ResizeFailed(life.trial, crew.devices)))


def end_growth(life: TrialStateMachine, reason: str, stays: bool = False) -> None:
    """The trial is not to grow again. ``stays``: it keeps the workers that it has; else it is shrunk to one."""
    crew = life.crew
    if crew.growth_ended:
        return
    crew.growth_ended = not stays
    warning = m.Warn(f"trial {life.trial} {'does not grow any more' if stays else 'goes on with one worker'}: {reason}")
    life.order(m.Write("growth_ended", reason=reason), warning)
    if crew.change == "attaching" and not stays:
        cancel_resize(life, "several workers do not help the trial")
    life.order(m.Tell(engine.GrowthEnded(life.trial, stays)))


def follower_failed(life: TrialStateMachine, workers: int, reason: str) -> None:
    """One of ``workers``, or of so many to be, failed by itself. The trial goes on. After the third growth in which one
    failed it keeps the workers that it has.
    """
    crew, before = life.crew, len(life.crew.failed_growths)
    crew.failed_at = workers
    crew.failed_growths.add(crew.generation)
    if before < MAX_DEATHS == len(crew.failed_growths):
        failed = f"workers of {MAX_DEATHS} growths failed before {workers} workers did an iteration, the last one by"
        end_growth(life, f"{failed} {reason}", stays=True)


def _settle(life: TrialStateMachine) -> None:
    """A new worker was attached or will not be: the resize is over when none is awaited any more."""
    crew = life.crew
    if crew.change != "attaching" or crew.awaited:
        return
    life.turn("steady")
    if set(crew.devices) == set(crew.wanted):
        _resized(life)
    else:
        cancel_resize(life, crew.failed)


# Events


@on_event.register
def _on_resize(event: engine.Resize, life: TrialStateMachine) -> None:
    if life.over:
        raise LifeError(life, f"it is to be resized to {event.devices}")
    discard_joining(life, "a device of the resize was lost")
    life.crew.wanted, life.crew.why = event.devices, event.why
    if life.has_place:
        begin_resize(life)


@on_event.register
def _on_joiner_found(event: m.JoinerFound, life: TrialStateMachine) -> None:
    crew, worker = life.crew, event.worker
    if worker.device not in crew.awaited or worker.device in crew.joining:
        raise LifeError(life, f"{worker.name} of device {worker.device} is to be attached")
    crew.joining[worker.device] = worker
    life.order(m.Attach(worker))


def _answered(life: TrialStateMachine, worker: m.Worker, failed: str | None = None) -> bool:
    """A worker that was to be attached has answered. False: it is none of the resize under way."""
    crew = life.crew
    if crew.joining.get(worker.device) is not worker:
        return False
    del crew.joining[worker.device]
    crew.awaited.discard(worker.device)
    crew.failed = crew.failed if failed is None else failed
    return True


@on_event.register
def _on_attached(event: m.Attached, life: TrialStateMachine) -> None:
    if _answered(life, event.worker):
        life.crew.followers[event.worker.device] = event.worker
        life.crew.note_devices()
        _settle(life)


@on_event.register
def _on_not_attached(event: m.NotAttached, life: TrialStateMachine) -> None:
    worker, why, wanted = event.worker, event.why, len(life.crew.wanted)
    if not _answered(life, worker, why):
        return
    if event.how == "refused":
        life.order(m.Unload(worker, "short"))
    elif event.how == "late":
        life.order(m.Discard(worker, why), m.Warn(f"trial {life.trial} does not grow now: {why}"))
    _settle(life)
    if event.how != "over":
        follower_failed(life, wanted, why)

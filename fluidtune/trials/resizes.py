"""How a resize that the engine wants is done, step by step, and when it is called off.

New workers run the trial's code up to its first boundary while the old ones train. When all of them stand ready, they
are told to enter the new group, and the leader is told of it with its next iteration. At a boundary the leader takes
them in, and says so with that iteration's result. To shrink, only the leader has to be told.
"""

from __future__ import annotations

from fluidtune.engine import messages as engine
from fluidtune.group_facts import Reform
from fluidtune.trials import messages as m
from fluidtune.trials.life import LifeError, TrialLife, on_event

#: Followers that may end by an error of their own before their trial is not grown any more.
MAX_FOLLOWER_ERRORS = 2
#: Why a resize has failed, in the event log.
CANNOT_GROW = "the trial cannot have several workers"


def begin_resize(life: TrialLife) -> None:
    """Bring the workers of an elastic trial to the devices ``wanted`` of its crew."""
    crew = life.crew
    if crew.facts.address is None:
        return  # its leader has not said where to be found; asked again after its next iteration
    if life.commits and life.outside.out_of_reach(crew.facts.address, crew.wanted):
        # It goes on from its commit, where the workers of all nodes reach it.
        ask_to_leave(life, "it is to have workers on a node that its leader is not reached from")
        life.order(m.Write("suspend_asked", reason=life.leaves_for))
        return
    if crew.change != "steady":
        raise LifeError(life, f"a resize to {crew.wanted} begins")
    new = [device for device in crew.wanted if device not in crew.members()]
    assert crew.why is not None
    devices = {"devices_from": list(crew.members()), "devices_to": list(crew.wanted)}
    life.order(m.Write("resize_started", {**devices, **crew.why.as_fields()}))
    crew.generation += 1
    crew.ready, crew.awaited = set(), set(new)
    if new:
        life.turn("gathering")
        life.order(*(m.RequestJoiner(device, crew.generation) for device in new))
    else:
        _all_ready(life)


def ask_to_leave(life: TrialLife, why: str) -> None:
    """The trial is to leave its devices at its next checkpoint or commit, for this reason, in words."""
    life.ask_to("leave")
    life.leaves_for = why


def _all_ready(life: TrialLife) -> None:
    """Let the new workers enter the group; the leader is told with its next iteration."""
    crew = life.crew
    assert crew.facts.address is not None
    workers = {**crew.members(), **crew.joining}
    members = tuple(workers[device].name for device in crew.wanted)
    group = crew.announced = Reform(crew.generation, members, crew.facts.address)
    joining, crew.joining, crew.awaited, crew.ready = crew.joining, {}, set(), set()
    life.turn("announced")
    for device, worker in joining.items():
        crew.followers[device] = worker
        life.order(m.Enter(worker, group))


def tell_leader(life: TrialLife) -> Reform | None:
    """The leader is sent an iteration. Returns the group that goes with it, if any."""
    crew = life.crew
    group, crew.announced = crew.announced, None
    if group is not None:
        # It keeps the group until a boundary at which the new workers have announced themselves.
        life.turn("reforming")
    return group


def call_off(life: TrialLife) -> list[m.Worker]:
    """Forget the resize under way. Returns the workers that were starting for it, which must be unloaded."""
    crew = life.crew
    joining, crew.joining = list(crew.joining.values()), {}
    crew.awaited, crew.ready, crew.announced = set(), set(), None
    life.turn("steady")
    return joining


def unload_joining(life: TrialLife) -> None:
    """Call the resize off."""
    life.order(*(m.Unload(worker, "short") for worker in call_off(life)))


def cancel_resize(life: TrialLife, reason: str) -> None:
    """A new worker did not get there: the trial stays as it is."""
    unload_joining(life)
    crew = life.crew
    crew.wanted = tuple(device for device in crew.devices if device in crew.members())
    failed = m.Write("resize_failed", {"devices": list(crew.wanted)}, reason)
    life.order(failed, m.Tell(engine.ResizeFailed(life.trial, crew.wanted)))


def end_growth(life: TrialLife, reason: str) -> None:
    """The trial must not have several workers again. It goes on with one, and a growth under way is called off."""
    if life.crew.growth_ended:
        return
    life.crew.growth_ended = True
    warning = m.Warn(f"trial {life.trial} goes on with one worker: {reason}")
    life.order(m.Write("growth_ended", reason=reason), warning)
    if life.crew.change == "gathering":  # workers that already stand ready are refused by the leader
        cancel_resize(life, CANNOT_GROW)
    life.order(m.Tell(engine.GrowthEnded(life.trial)))


def follower_failed(life: TrialLife, reason: str) -> None:
    """A follower's own code failed. The trial goes on, but the second time it does not grow again."""
    crew = life.crew
    crew.follower_errors += 1
    if crew.follower_errors >= MAX_FOLLOWER_ERRORS:
        end_growth(life, f"its loop failed in {crew.follower_errors} further workers, the last time by {reason}")


def group_reformed(life: TrialLife, generation: float, seconds: float) -> None:
    """The leader says that it has formed the new group, with a pause of ``seconds``."""
    crew = life.crew
    if generation != crew.generation or crew.change != "reforming":
        return
    life.turn("steady")
    crew.followers = {device: worker for device, worker in crew.followers.items() if device in crew.wanted}
    crew.width, crew.devices = len(crew.wanted), crew.wanted
    done = m.Write("resized", {"devices": list(crew.wanted), "seconds": seconds})
    life.order(done, m.Tell(engine.Resized(life.trial, crew.wanted, seconds)))


def resize_refused(life: TrialLife, generation: float) -> None:
    """The leader did not take its new workers in. They end by themselves."""
    crew = life.crew
    if generation != crew.generation or crew.change != "reforming":
        return
    crew.followers = {device: worker for device, worker in crew.followers.items() if device in crew.devices}
    cancel_resize(life, CANNOT_GROW)


def resize_again(life: TrialLife) -> None:
    """The trial was started on several devices, and only now has its loop said where followers find the leader, or that
    it is not elastic or cannot be divided. In these two cases the other devices are given back.
    """
    crew = life.crew
    if life.gang or len(crew.wanted) <= crew.width or crew.change != "steady":
        return
    if life.kind == "elastic" and not crew.growth_ended:
        begin_resize(life)
    else:
        elastic = life.kind == "elastic"
        cancel_resize(life, CANNOT_GROW if elastic else "its loop does not call fluidtune.elastic")


# Events


@on_event.register
def _on_resize_wanted(event: m.ResizeWanted, life: TrialLife) -> None:
    if life.over:
        raise LifeError(life, f"it is to be resized to {event.devices}")
    life.crew.wanted, life.crew.why = event.devices, event.why
    begin_resize(life)


@on_event.register
def _on_joiner_found(event: m.JoinerFound, life: TrialLife) -> None:
    crew, worker = life.crew, event.worker
    if worker.device not in crew.awaited or worker.device in crew.joining:
        raise LifeError(life, f"{worker.name} of device {worker.device} is to join")
    crew.joining[worker.device] = worker
    first = next(device for device in crew.wanted if device in crew.awaited)
    life.order(m.Join(worker, first=worker.device == first))


def _joins(life: TrialLife, worker: m.Worker) -> bool:
    return life.crew.joining.get(worker.device) is worker


@on_event.register
def _on_joined(event: m.Joined, life: TrialLife) -> None:
    crew, worker = life.crew, event.worker
    if not _joins(life, worker):
        return
    if event.verdict is not None:
        kind, reason = event.verdict
        life.order(m.NoteVerdict(kind), m.Write("growth_checked", {"verdict": kind}, reason))
        if kind == "differs":
            end_growth(life, reason)
            return
    crew.ready.add(worker.device)
    if crew.ready == crew.awaited:
        _all_ready(life)


@on_event.register
def _on_join_failed(event: m.JoinFailed, life: TrialLife) -> None:
    if _joins(life, event.worker):
        follower_failed(life, event.why)
        if life.crew.change != "steady":  # else it was called off together with the growth
            cancel_resize(life, event.why)


@on_event.register
def _on_joiner_died(event: m.JoinerDied, life: TrialLife) -> None:
    if _joins(life, event.worker):
        del life.crew.joining[event.worker.device]
        life.order(m.Bury(event.worker, event.error))
        cancel_resize(life, str(event.error))


@on_event.register
def _on_joiner_late(event: m.JoinerLate, life: TrialLife) -> None:
    if _joins(life, event.worker):
        reason = f"a new worker has not come to its loop's first boundary in {event.seconds:.0f} s"
        life.order(m.Warn(f"trial {life.trial} does not grow now: {reason}"))
        _on_join_failed(m.JoinFailed(event.worker, reason), life)

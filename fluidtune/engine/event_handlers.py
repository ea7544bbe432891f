"""What each event changes in the books: one function per event, called `_on_` and the name of the event.

`apply_event` finds the function for an event. A function checks its event before it changes anything, and raises
EngineError for an event that cannot be true. It decides nothing but what follows from the event at once: a `Release` of
devices that the trial gave back. All else is decided after the last event of a batch, in `Engine.handle`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import singledispatch

from fluidtune.engine import messages as m
from fluidtune.engine.estimates import current_width, path
from fluidtune.engine.packing_search import note_iteration
from fluidtune.engine.reasons import Reason, Why, because
from fluidtune.engine.speed import GroupSpeed
from fluidtune.engine.state import State
from fluidtune.engine.trial import EngineError, Group, Trial


@singledispatch
def apply_event(event: m.Event, state: State, now: float) -> Iterable[m.Instruction]:
    """Changes the books for one event and returns what follows from it at once. Raises EngineError; see above."""
    raise EngineError(f"{event!r} is not an event the engine knows; see fluidtune.engine.messages")


# Devices


@apply_event.register
def _on_device_gained(event: m.DeviceGained, state: State, now: float) -> Iterable[m.Instruction]:
    state.devices.add_device(event.device, event.node)
    state.reconsider = True
    return ()


@apply_event.register
def _on_device_leaving(event: m.DeviceLeaving, state: State, now: float) -> Iterable[m.Instruction]:
    devices = state.devices
    if event.device not in devices.node or event.device in devices.leaving:
        raise EngineError(f"device {event.device} is unknown or leaves already; gain it first, let it leave once")
    devices.mark_leaving(event.device)
    return ()


@apply_event.register
def _on_device_lost(event: m.DeviceLost, state: State, now: float) -> Iterable[m.Instruction]:
    devices = state.devices
    if event.device not in devices.node:
        raise EngineError(f"device {event.device} was lost but is not known; gain it first, lose it once")
    out: list[m.Instruction] = []
    for name in list(devices.tenants[event.device]):
        trial = state.trials[name]
        if trial.gang == 1 and trial.status == "running" and trial.devices[0] != event.device:
            out += _lose_follower(state, trial, event.device)
        else:
            out += _send_to_front(state, trial, now, because(Reason.DEVICE_LOST), gone=event.device)
    devices.remove_device(event.device)
    return out


@apply_event.register
def _on_model_found(event: m.ModelFound, state: State, now: float) -> Iterable[m.Instruction]:
    if event.device in state.devices.node and state.devices.models.note(event.device, event.model):
        state.reconsider = state.reconsider or state.devices.models.mixed
    state.events_before_look += 1  # it is no reason to look sooner: where all devices are of one model, nothing follows
    return ()


# Groups and trials


@apply_event.register
def _on_group_announced(event: m.GroupAnnounced, state: State, now: float) -> Iterable[m.Instruction]:
    group = state.groups.get(event.group)
    if event.concurrency is not None and event.concurrency < 1:
        raise EngineError(f"group {event.group!r}: concurrency {event.concurrency}, expected >= 1 or None")
    if group is None:
        speed = GroupSpeed(state.job_speed)
        state.groups[event.group] = Group(event.group, event.synchronous, event.concurrency, event.tail, speed)
    elif group.synchronous != event.synchronous:
        raise EngineError(f"group {event.group!r} cannot change synchronous; announce a new group")
    else:
        group.concurrency, group.tail = event.concurrency, event.tail
    return ()


@apply_event.register
def _on_trial_added(event: m.TrialAdded, state: State, now: float) -> Iterable[m.Instruction]:
    group = known_group(state, event.group)
    share = event.share
    if not (share > 0 and math.isfinite(share)) or (share > 1 and share != int(share)):
        raise EngineError(f"trial {event.trial!r}: share is {share!r}, expected (0, 1] or a whole number")
    _check_iterations(event.trial, event.iterations)
    trial = state.trials.get(event.trial)
    number = state.next_number()
    if trial is None:
        trial = Trial(event.trial, group, event.kind, share, event.iterations, number, target=event.iterations)
        trial.traits = event.traits
        state.predictor.add_trial(event.traits)
        state.trials[event.trial] = trial
    elif trial.status in ("paused", "ended"):
        trial.group = group
        trial.ask_for(share)
        trial.set_budget(event.iterations)
        trial.number = number
        # The shell may add it as plain again. The engine keeps the kind that was found while the trial ran.
        trial.kind = event.kind if event.kind != "plain" else trial.kind
    else:
        raise EngineError(f"trial {event.trial!r} was added while it is {trial.status}; end it first")
    if event.growable and trial.growth == "unknown":
        trial.growth = "possible"
    trial.planned, trial.turn = None, event.turn
    state.enqueue(trial, path(state, trial), now)
    return ()


@apply_event.register
def _on_kind_found(event: m.KindFound, state: State, now: float) -> Iterable[m.Instruction]:
    known_trial(state, event.trial).kind = event.kind
    state.reconsider = True
    return ()


@apply_event.register
def _on_can_grow(event: m.CanGrow, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    if trial.growth == "unknown":
        trial.growth = "possible"
    state.reconsider = True
    return ()


@apply_event.register
def _on_growth_ended(event: m.GrowthEnded, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    trial.growth = "held" if event.stays and trial.growth != "ended" else "ended"
    state.reconsider = True
    return ()


@apply_event.register
def _on_gang_found(event: m.GangFound, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    if event.devices < 2:
        raise EngineError(f"{event!r}: expected at least 2 devices")
    if trial.status == "waiting":
        state.waiting.remove(trial)
        trial.ask_for(event.devices)
        state.waiting.put(trial, path(state, trial))
        state.new_in_batch = None  # the batch to plan is another one
    return ()


@apply_event.register
def _on_budget_changed(event: m.BudgetChanged, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    _check_iterations(event.trial, event.iterations)
    trial.set_budget(event.iterations)
    if trial.status == "waiting":
        state.requeue(trial, path(state, trial))
    state.reconsider = True
    return ()


@apply_event.register
def _on_trial_ended(event: m.TrialEnded, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    if trial.status == "ended":
        return ()
    out: list[m.Instruction] = []
    if trial.status in ("running", "suspending"):
        out.append(m.Release(trial.name, tuple(state.vacate_devices(trial)), why=because(Reason.TRIAL_LEFT)))
    if event.ending == "stopped" and trial.done:
        trial.group.speed.record_end(trial.name, trial.done)
    state.retire(trial, now, "paused" if event.ending == "paused" else "ended")
    return out


# Results


@apply_event.register
def _on_result(event: m.Result, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    if not (math.isfinite(event.seconds) and event.seconds > 0 and (event.width is None or event.width > 0)):
        raise EngineError(f"{event!r}: expected finite seconds > 0 and a width > 0, or None")
    if _is_late(trial, event):
        return ()
    if event.memory is not None:
        _record_memory(state, trial, event)
    if event.width is not None:
        note_iteration(state, trial, event.seconds, now)
    trial.settled = True
    news = event.width is not None and _record_seconds(state, trial, event.seconds, event.width)
    trial.done += 1
    if trial.iterations is not None:
        trial.iterations = max(0.0, trial.iterations - 1)
    if trial.name in state.wide:
        state.check_back[trial.name] = None
    if trial.iterations is None and trial.done & (trial.done - 1) == 0:
        # A trial with an unknown end is taken to have done half: what is left has now doubled.
        news = True
    if trial.cooldown:
        trial.cooldown -= 1
        news = news or not trial.cooldown
    if news and (trial.kind != "plain" or trial.can_grow) and trial.worth_growing:
        state.reconsider = True
    return ()


def _record_memory(state: State, trial: Trial, event: m.Result) -> None:
    _check_memory(event)
    assert event.memory is not None
    if state.search is not None:
        state.search.record_memory(event.memory)
    if state.sharing is not None:
        compute = event.compute if state.is_alone(trial) else None
        state.sharing.record_need(trial, event.memory, event.ephemeral, compute)
        if len(trial.devices) == 1:
            state.sharing.promise_anew(trial, state.tenants_of(trial.devices[0]))


def _record_seconds(state: State, trial: Trial, taken: float, width: float) -> bool:
    """Adds an iteration to the figures of its width. Returns whether it is news for the trial's speed."""
    # The books know better than the shell which trials share the device: a trial that is alone runs at width 1.
    on_one = width <= 1 and len(trial.devices) == 1
    width = current_width(state, trial) if on_one else width
    if on_one:
        # The width at which it ran is unknown while a neighbour loads, or if the lane policy lets others go first.
        neighbours = state.devices.tenants[trial.devices[0]]
        if width <= 0 or not all(state.trials[name].settled for name in neighbours):
            return False
    news = trial.speed.record_result(width, taken)
    trial.group.speed.record_result(trial.name, trial.speed, width, trial.gang)
    usual = trial.gang
    seconds = trial.speed.seconds(usual) if width == usual and trial.speed.count(usual) else None
    if seconds is not None and state.predictor.record_seconds(trial.name, trial.traits, seconds * usual):
        state.new_in_batch = None  # the heights of trials that have not run have changed
    return news


@apply_event.register
def _on_need_found(event: m.NeedFound, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    _check_memory(event)
    if state.sharing is not None:
        state.sharing.record_lack(trial, event.memory, event.ephemeral)
    elif state.search is not None:
        state.search.record_memory(event.memory)
    return ()


# Resizes and losses


@apply_event.register
def _on_resized(event: m.Resized, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    return () if _is_late_answer(trial, event) else state.end_resize(trial, event.devices, Reason.RESIZE_DONE)


@apply_event.register
def _on_resize_failed(event: m.ResizeFailed, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    return () if _is_late_answer(trial, event) else state.end_resize(trial, event.devices, Reason.RESIZE_FAILED)


@apply_event.register
def _on_worker_lost(event: m.WorkerLost, state: State, now: float) -> Iterable[m.Instruction]:
    trial = known_trial(state, event.trial)
    if _is_late(trial, event):
        return ()
    held = trial.held
    # It may have lost a device, of which the shell had not heard.
    late = trial.past == "lost"
    left = tuple(device for device in event.left if device in held) if late else event.left
    if event.left and (not (late or set(left) < set(held)) or left[:1] != trial.devices[:1]):
        raise EngineError(f"{event!r}: the trial holds {held}; expected some of those, its first one first")
    if not left:
        return _send_to_front(state, trial, now, because(Reason.WORKER_LOST, to=0))
    trial.past = "lost"
    out = state.end_resize(trial, left, Reason.WORKER_LOST)
    if left != event.left:
        trial.resizing_to, state.narrowed[trial.name] = left, None
    return out


def _lose_follower(state: State, trial: Trial, device: int) -> list[m.Instruction]:
    """A device is gone that is not the trial's first one: it goes on with the others that it runs on."""
    devices, width = state.devices, len(trial.devices)
    staying = tuple(each for each in trial.devices if each != device)
    promised = tuple(each for each in trial.held if each not in trial.devices and each != device)
    for each in (device, *promised):
        devices.remove_tenant(each, trial.name)
    trial.devices = trial.resizing_to = staying
    trial.past = "lost"
    if len(staying) != width:
        trial.speed.restart()
    state.update_wide(trial)
    state.reconsider = True
    state.narrowed[trial.name] = None
    return [m.Release(trial.name, promised, why=because(Reason.DEVICE_LOST))] if promised else []


def _send_to_front(state: State, trial: Trial, now: float, why: Why, gone: int | None = None) -> list[m.Instruction]:
    """The trial gives up its devices, which are released because of ``why``, and waits at the front of the queue.

    ``gone``: a device that is no longer there.
    """
    devices = tuple(device for device in state.vacate_devices(trial) if device != gone)
    trial.first, trial.past = True, "lost"
    trial.number = state.next_number()
    state.enqueue(trial, path(state, trial), now)
    return [m.Release(trial.name, devices, why=why)] if devices else []


# Checks


def known_trial(state: State, name: str) -> Trial:
    """The trial. Raises EngineError if it was never added."""
    trial = state.trials.get(name)
    if trial is None:
        raise EngineError(f"trial {name!r} is not known; add it first")
    return trial


def known_group(state: State, name: str) -> Group:
    """The group. Raises EngineError if it was never announced."""
    group = state.groups.get(name)
    if group is None:
        raise EngineError(f"group {name!r} is not known; announce it first")
    return group


def _check_iterations(name: str, iterations: float | None) -> None:
    if iterations is not None and not (math.isfinite(iterations) and iterations >= 0):
        raise EngineError(f"trial {name!r}: iterations is {iterations!r}, expected >= 0 or None")


def _check_memory(event: m.Result | m.NeedFound) -> None:
    memory, ephemeral = event.memory, event.ephemeral
    assert memory is not None
    if not (math.isfinite(memory) and memory >= 0 and 0 <= ephemeral <= memory):
        raise EngineError(
            f"{event!r}: expected memory as a part of a device's, finite and >= 0, and ephemeral as a part of it"
        )


def _is_late(trial: Trial, event: m.Event) -> bool:
    """Whether the event comes late: the trial has run and does not run now. Raises EngineError if it never ran."""
    if trial.status in ("running", "suspending"):
        return False
    if trial.past == "new":
        raise EngineError(f"{event!r}: the trial was never started")
    return True


def _is_late_answer(trial: Trial, event: m.Resized | m.ResizeFailed) -> bool:
    """Whether the answer is about a resize that was called off. Raises EngineError if there never was such a resize."""
    if _is_late(trial, event):
        return True
    fits = trial.resizing_to is not None and event.devices and set(event.devices) <= set(trial.held)
    if not fits and trial.past != "lost":
        raise EngineError(
            f"{event!r}: the trial was told to change to {trial.resizing_to} and holds {trial.held}; "
            "expected devices out of those, and one answer to each resize"
        )
    return not fits

"""Decides which running trials change their width: DynamicFluid (alg. 3.2), and what the paper leaves open.

Only trials that can grow are resized, each by one resize at a time. A trial that shares a device and can be moved may
be suspended, so that it can resume alone on another. Whatever can be moved is taken off a device that is leaving.
Nothing here starts a trial, and nothing grows while a trial waits that could use a device.
"""

from __future__ import annotations

import heapq

from fluidtune.engine.estimates import (
    current_width,
    height,
    iterations_left,
    knows_scaling,
    scaling_overhead,
    seconds_left,
)
from fluidtune.engine.messages import Instruction, Resize, Suspend
from fluidtune.engine.reasons import Reason, Why, because
from fluidtune.engine.speed import TRUSTED, scaled
from fluidtune.engine.state import State
from fluidtune.engine.trial import Trial
from fluidtune.engine.width_rules import EPSILON, change_pays, widest
from fluidtune.planning.fluid import resize_pays, static_widths

#: After `rebalance_widths` has looked at m trials it looks again after m divided by this many events at the earliest.
#: While each trial does one iteration, m events come. So a trial waits for a thirty-second part of an iteration, its
#: resize waits for the iteration's end in any case, and up to 31 trials never wait. Without this, each event costs
#: time in proportion to m (`benchmarks.driver --only narrow`).
LOOK_AGAIN = 32
#: A suspension pays if it saves this many times what a resize costs: it restarts the trial.
SUSPEND_FACTOR = 5


def leave_lost_devices(state: State) -> list[Instruction]:
    """Tells trials that have lost a device, but not their first one, to go on with the others."""
    trials = [state.trials[name] for name in state.narrowed]
    state.narrowed.clear()
    why = because(Reason.DEVICE_LOST)
    return [Resize(trial.name, trial.devices, why=why) for trial in trials if trial.resizing_to is not None]


def clear_leaving_devices(state: State, now: float) -> list[Instruction]:
    """Takes trials off devices that leave: a wide trial whose first worker may stay shrinks.

    Others are suspended, unless they could go on from nothing only.
    """
    out: list[Instruction] = []
    leaving = state.devices.leaving
    for name in dict.fromkeys(name for device in sorted(leaving) for name in state.devices.tenants[device]):
        trial = state.trials[name]
        if not _at_rest(trial):
            continue
        staying = tuple(device for device in trial.devices if device not in leaving)
        width = len(trial.devices)
        why = because(Reason.LEAVING_DEVICE, width=width, leaving=width - len(staying))
        if trial.gang == 1 and staying[:1] == trial.devices[:1]:
            state.promise_devices(trial, staying)
            out.append(Resize(name, staying, why=why))
        elif trial.kind != "plain":
            state.suspend(trial, now)
            out.append(Suspend(name, why=why))
    return out


def shrink_ungrowable_trials(state: State) -> list[Instruction]:
    """Takes trials that must not have several workers any more back to one."""
    wide = [trial for name in state.wide if (trial := state.trials[name]).growth == "ended" and trial.steady]
    return [_shrink(state, trial, 1, because(Reason.GROWTH_ENDED, width=len(trial.devices), to=1)) for trial in wide]


def shrink_slower_trials(state: State) -> list[Instruction]:
    """Shrinks trials that turned out slower at their width than they were, or would be, at a smaller one."""
    out: list[Instruction] = []
    for name in [name for name in state.check_back if name in state.wide]:
        trial = state.trials[name]
        width = len(trial.devices)
        if not _at_rest(trial) or width < 2 or trial.speed.count(width) < TRUSTED:
            continue
        narrower = {int(w) for w in trial.speed.widths() if 1 <= w < width}
        if knows_scaling(trial):
            narrower |= {min(width, widest(state, trial))}
        best = min(narrower, key=lambda w: (seconds_left(state, trial, w), w), default=width)
        left, left_to = seconds_left(state, trial, width), seconds_left(state, trial, best)
        if left_to + EPSILON < left:
            seconds, seconds_to = (each / iterations_left(trial) for each in (left, left_to))
            why = because(Reason.SLOWER, width=width, to=best, seconds=seconds, seconds_to=seconds_to)
            out.append(_shrink(state, trial, best, why))
    state.check_back.clear()
    return out


def shrink_for_waiting(state: State, wanted: int) -> list[Instruction]:
    """Frees up to ``wanted`` devices for trials that wait, where scaling down pays.

    The rule alone never shrinks a trial that scales perfectly, since that does the same work per device at every width.
    If it is unknown how long such a trial will run, the others might wait for ever, so it shrinks in any case.
    """
    out: list[Instruction] = []
    for name in state.wide:
        trial = state.trials[name]
        if trial.resizing_to is not None:
            wanted -= len(set(trial.devices) - set(trial.resizing_to))
    wide = [state.trials[name] for name in state.wide]
    # Mostly nobody does, and then nothing is sorted: this is asked at every event while a trial waits.
    if wanted <= 0 or not any(_spares(state, trial, wanted) for trial in wide):
        return []
    for trial in sorted(wide, key=lambda trial: height(state, trial)):
        if wanted > 0 and (spared := _spares(state, trial, wanted)):
            narrower = len(trial.devices) - spared
            numbers = _times(state, trial, narrower)
            why = because(Reason.WAITING_TRIALS, waiting=len(state.waiting), wanted=wanted, **numbers)
            out.append(_shrink(state, trial, narrower, why))
            wanted -= spared
    return out


def _spares(state: State, trial: Trial, wanted: int) -> int:
    """How many of ``wanted`` devices a wide trial gives to trials that wait; 0 where scaling down does not pay."""
    width = len(trial.devices)
    narrower = max(1, width - wanted)
    gives = _at_rest(trial) and (trial.iterations is None or change_pays(state, trial, width, narrower))
    return width - narrower if gives else 0


def rebalance_widths(state: State, now: float) -> list[Instruction]:
    """Suspensions, then DynamicFluid over the trials that can grow and what its floor leaves idle; if nothing waits."""
    state.reconsider = False
    state.events_before_look = len(state.running) // LOOK_AGAIN
    idle = len(state.devices.idle) - len(state.claims)
    if idle <= 0:
        return []
    out = _suspend_sharing(state, idle, now)
    spare = idle - len(out)
    movers = [
        trial
        for trial in map(state.trials.__getitem__, state.running)
        if trial.growth != "unknown" and trial.gang == 1 and trial.resizing_to is None
        if len(trial.devices) > 1 or state.is_alone(trial)  # trials that share a device do not grow
    ]
    if spare <= 0 or not any(_may_want(state, trial) for trial in movers):
        return out
    largest_first = sorted([(-height(state, trial), trial.number, trial) for trial in movers])
    movers = [trial for _, _, trial in largest_first]
    targets, shrinks = _targets(state, movers, [-negative for negative, _, _ in largest_first], spare)
    for trial in movers:
        width, target = len(trial.devices), targets[trial.name]
        if target > width and _may_grow(state, trial):
            devices = trial.devices + tuple(state.devices.pick_near(trial.devices[0], target - width))
            numbers = _times(state, trial, len(devices))
            why = because(Reason.IDLE_DEVICES, idle=spare, resize=EPSILON, **numbers)
            spare -= len(devices) - width
            state.promise_devices(trial, devices)
            out.append(Resize(trial.name, devices, why=why))
    for trial in shrinks:
        why = because(Reason.BALANCE, **_times(state, trial, targets[trial.name]))
        out.append(_shrink(state, trial, targets[trial.name], why))
    return out


def _times(state: State, trial: Trial, to: int) -> dict[str, float]:
    """The numbers of a change of width: the widths before and after, and the seconds left at each."""
    width = len(trial.devices)
    left, left_to = seconds_left(state, trial, width), seconds_left(state, trial, to)
    return {"width": width, "to": to, "left": left, "left_to": left_to}


def _targets(state: State, movers: list[Trial], heights: list[float], spare: int) -> tuple[dict[str, int], list[Trial]]:
    """The width that each mover should have, and the movers that shrink. ``movers``: largest of ``heights`` first.

    ``spare``: idle devices. Growth takes only these, so that the widths never add up to more than is there. Trials that
    are not measured yet get their part too. It waits for their first result and goes to no other trial.
    """
    widths = {trial.name: len(trial.devices) for trial in movers}
    limits = {trial.name: widest(state, trial) for trial in movers}
    planned = _planned_widths(state, movers, heights, spare + sum(widths.values()), max(limits.values()))
    targets = dict(widths)
    short = 0
    for trial in movers:
        width = widths[trial.name]
        wanted = min(planned[trial.name], limits[trial.name])
        if wanted <= width or not _may_want(state, trial):
            continue
        target = min(wanted, width + spare, _reach(state, trial))
        short += wanted - target
        if target > width and change_pays(state, trial, width, target):
            targets[trial.name] = target
            spare -= target - width
    shrinks = []
    for trial in reversed(movers):
        if short <= 0:
            break
        width, wanted = widths[trial.name], max(1, planned[trial.name])
        if wanted < width and _at_rest(trial) and change_pays(state, trial, width, wanted):
            targets[trial.name] = wanted
            shrinks.append(trial)
            short -= width - wanted
    if spare:
        shrinking = {trial.name for trial in shrinks}
        _hand_out(state, [trial for trial in movers if trial.name not in shrinking], targets, spare)
    return targets, shrinks


def _planned_widths(state: State, movers: list[Trial], heights: list[float], n: int, d: int) -> dict[str, int]:
    """DynamicFluid (alg. 3.2) over ``movers`` on ``n`` devices, by trial; most of them keep their widths."""
    planned = {trial.name: len(trial.devices) for trial in movers}
    for trial, alone, static in zip(movers, heights, static_widths(heights, n, c=1, d=d), strict=True):
        held, wanted = planned[trial.name], int(static)
        if wanted != held:
            before, after = (alone * scaled(scaling_overhead(trial), width) for width in (held, wanted))
            planned[trial.name] = wanted if resize_pays(before, after, held, wanted, EPSILON) else held
    return planned


def _hand_out(state: State, trials: list[Trial], targets: dict[str, int], spare: int) -> None:
    """Gives what the floor in StaticFluid left idle, one device at a time, to the trial that would end last.

    [10, 1, 1] on 4 devices leaves one idle, two equal trials on 3 leave one; the paper lets these devices idle.
    """
    heap = [
        (-seconds_left(state, trial, targets[trial.name]), trial.number, trial)
        for trial in trials
        if _may_want(state, trial)
    ]
    heapq.heapify(heap)
    while spare and heap:
        _, number, trial = heapq.heappop(heap)
        wider = targets[trial.name] + 1
        if wider <= _reach(state, trial) and change_pays(state, trial, len(trial.devices), wider):
            targets[trial.name] = wider
            spare -= 1
            heapq.heappush(heap, (-seconds_left(state, trial, wider), number, trial))


def _suspend_sharing(state: State, idle: int, now: float) -> list[Instruction]:
    """Suspends trials that share a device and can be moved, at most one for every idle device, where it pays."""
    out: list[Instruction] = []
    for trial in worth_a_device(state, idle):
        width, reach = current_width(state, trial), _reach_alone(state, trial, idle)
        left, left_to = seconds_left(state, trial, width), seconds_left(state, trial, reach)
        why = because(Reason.OWN_DEVICE, idle=idle, width=width, to=reach, left=left, left_to=left_to)
        state.suspend(trial, now)
        out.append(Suspend(trial.name, why=why))
    return out


def _reach_alone(state: State, trial: Trial, idle: int) -> int:
    """The width that a trial which shares a device may get elsewhere, where it may also grow."""
    return min(widest(state, trial), idle) if knows_scaling(trial) else 1


def worth_a_device(state: State, idle: int) -> list[Trial]:
    """Trials that share a device and can be moved, and for which a device of their own pays; at most ``idle``.

    Of the trials of one device, at most one leaves it at a time.
    """
    out: list[Trial] = []
    devices = state.devices
    if not devices.any_shared:
        return out
    left: set[int] = set()
    sharing = [trial for name in state.running if len(devices.tenants[(trial := state.trials[name]).devices[0]]) > 1]
    for trial in sharing:
        if len(out) >= idle:
            break
        if trial.kind == "plain" or not _at_rest(trial) or trial.gang > 1 or not trial.worth_growing:
            continue
        device = trial.devices[0]
        width = current_width(state, trial)
        tenants = [state.trials[name] for name in devices.tenants[device]]
        if width >= 1 or device in left or any(other.status == "suspending" for other in tenants):
            continue
        saved = seconds_left(state, trial, width) - seconds_left(state, trial, _reach_alone(state, trial, idle))
        if saved > SUSPEND_FACTOR * EPSILON:
            out.append(trial)
            left.add(device)
    return out


def next_width(state: State, trial: Trial, most: int) -> int:
    """The width to which it would grow next in a job of ``most`` devices; its own if it does not grow."""
    width = len(trial.devices)
    if not trial.can_grow or not _may_grow(state, trial) or not _may_want(state, trial):
        return width
    if width == 1 and not state.is_alone(trial):
        return width
    return max(width, _reach(state, trial, most))


def _reach(state: State, trial: Trial, most: int | None = None) -> int:
    """How wide it may get at once: d if its beta is known, else at most twice as wide after each measured width."""
    width, limit = len(trial.devices), widest(state, trial, most)
    if knows_scaling(trial):
        return limit
    return min(limit, 2 * width if width == 1 or trial.speed.count(width) >= TRUSTED else width)


def _at_rest(trial: Trial) -> bool:
    """It runs, no resize is under way, and none failed a moment ago."""
    return trial.steady and not trial.cooldown


def _may_want(state: State, trial: Trial) -> bool:
    """It would be given more devices if there were any, now or after its first result."""
    return not trial.cooldown and trial.worth_growing


def _may_grow(state: State, trial: Trial) -> bool:
    """It is at rest, and its speed at the width that it has was measured."""
    return _at_rest(trial) and trial.speed.seconds(current_width(state, trial)) is not None


def _shrink(state: State, trial: Trial, width: int, why: Why) -> Resize:
    """The trial keeps its first worker and, up to ``width``, those of its device's model; first those nearest to it."""
    first, models = trial.devices[0], state.devices.models
    home = state.devices.node[first]
    near = sorted(trial.devices[1:], key=lambda d: (not models.alike(first, d), state.devices.node[d] != home))
    devices = (first, *near[: width - 1])
    state.promise_devices(trial, devices)
    return Resize(trial.name, devices, why=why)

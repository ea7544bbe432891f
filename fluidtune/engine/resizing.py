"""Decides which running trials change their width: DynamicFluid, and what the paper leaves open.

Only elastic trials are resized, one resize at a time each; a packed trial that can be moved may be suspended so
that it can come back on a device of its own, and whatever can be moved is taken off a device that leaves. Nothing
here starts a trial, and nothing grows while a trial waits that could start.
"""

from __future__ import annotations

import heapq

from fluidtune.engine.messages import Instruction, Resize, Suspend
from fluidtune.engine.speed import TRUSTED
from fluidtune.engine.state import State
from fluidtune.engine.trial import Trial
from fluidtune.planning import dynamic_fluid

#: A suspension pays if it gains this many times what a resize costs: it restarts the trial.
SUSPEND_FACTOR = 5


def evacuate(state: State, now: float) -> list[Instruction]:
    """Takes trials off devices that leave: a wide one whose first worker stays shrinks, others are suspended."""
    out: list[Instruction] = []
    leaving = state.devices.leaving
    for name in dict.fromkeys(name for device in sorted(leaving) for name in state.devices.tenants[device]):
        trial = state.trials[name]
        if trial.kind == "plain" or not _at_rest(trial):
            continue
        staying = tuple(device for device in trial.devices if device not in leaving)
        if trial.kind == "elastic" and trial.gang == 1 and staying[:1] == trial.devices[:1]:
            state.promise(trial, staying)
            out.append(Resize(name, staying))
        else:
            state.suspend(trial, now)
            out.append(Suspend(name))
    return out


def shrink_slower(state: State) -> list[Instruction]:
    """Trials that turned out slower at their width than they were, or would be, at a smaller one go there."""
    out: list[Instruction] = []
    for name in [name for name in state.check_back if name in state.wide]:
        trial = state.trials[name]
        width = len(trial.devices)
        if not _at_rest(trial) or width < 2 or trial.speed.count(width) < TRUSTED:
            continue
        narrower = {int(w) for w in trial.speed.widths() if 1 <= w < width}
        if state.knows_scaling(trial):
            narrower |= {min(width, state.widest(trial))}
        best = min(narrower, key=lambda w: (state.seconds_left(trial, w), w), default=width)
        if state.change_pays(trial, width, best):
            out.append(_shrink(state, trial, best))
    state.check_back.clear()
    return out


def shrink_for(state: State, wanted: int) -> list[Instruction]:
    """Frees up to ``wanted`` devices for trials that wait, where scaling down pays.

    The rule alone never shrinks a trial that scales perfectly, as the work done per device stays the same. If
    nobody knows how long such a trial will run, the others would wait for ever: it gives up what it has.
    """
    out: list[Instruction] = []
    for name in state.wide:
        trial = state.trials[name]
        if trial.resizing_to is not None:
            wanted -= len(set(trial.devices) - set(trial.resizing_to))
    for trial in sorted((state.trials[name] for name in state.wide), key=state.height):
        if wanted <= 0:
            break
        width = len(trial.devices)
        narrower = max(1, width - wanted)
        if _at_rest(trial) and (trial.iterations is None or state.shrink_pays(trial, width, narrower)):
            out.append(_shrink(state, trial, narrower))
            wanted -= width - narrower
    return out


def rebalance(state: State, now: float) -> list[Instruction]:
    """DynamicFluid over the elastic trials, what its floor left idle, and suspensions. Nothing waits."""
    state.reconsider = False
    idle = len(state.devices.idle) - len(state.claims)
    if idle <= 0:
        return []
    out = _suspend(state, idle, now)
    spare = idle - len(out)
    movers = [
        trial
        for trial in map(state.trials.__getitem__, state.running)
        if trial.kind == "elastic" and trial.gang == 1 and trial.resizing_to is None
        if len(trial.devices) > 1 or state.is_alone(trial)  # two that share a device stay there until one has ended
    ]
    if spare <= 0 or not any(_may_want(state, trial) for trial in movers):
        return out
    movers.sort(key=lambda trial: (-state.height(trial), trial.number))
    targets, shrinks = _targets(state, movers, spare)
    for trial in movers:
        width, target = len(trial.devices), targets[trial.name]
        if target > width and _may_grow(state, trial):
            devices = trial.devices + tuple(state.devices.pick_near(trial.devices[0], target - width))
            state.promise(trial, devices)
            out.append(Resize(trial.name, devices))
    return out + [_shrink(state, trial, targets[trial.name]) for trial in shrinks]


def _targets(state: State, movers: list[Trial], spare: int) -> tuple[dict[str, int], list[Trial]]:
    """The width that each mover should have, and those that shrink for it. ``movers``: largest height first.

    Growth takes only what is idle, so the widths together are at most what is there. Trials that are not
    measured yet get their part too: it waits for their first result and does not go to whoever is first.
    """
    widths = {trial.name: len(trial.devices) for trial in movers}
    widest = {trial.name: state.widest(trial) for trial in movers}
    n = spare + sum(widths.values())
    loads = [state.load(trial) for trial in movers]
    planned = dynamic_fluid(loads, widths, n, c=1, d=max(widest.values()), epsilon=state.epsilon)
    targets = dict(widths)
    short = 0
    for trial in movers:
        width = widths[trial.name]
        wanted = min(int(planned[trial.name]), widest[trial.name])
        if wanted <= width or not _may_want(state, trial):
            continue
        target = min(wanted, width + spare, _reach(state, trial))
        short += wanted - target
        if target > width and state.change_pays(trial, width, target):
            targets[trial.name] = target
            spare -= target - width
    shrinks = []
    for trial in reversed(movers):
        if short <= 0:
            break
        width, wanted = widths[trial.name], max(1, int(planned[trial.name]))
        if wanted < width and _at_rest(trial) and state.shrink_pays(trial, width, wanted):
            targets[trial.name] = wanted
            shrinks.append(trial)
            short -= width - wanted
    if spare:
        _hand_out(state, [trial for trial in movers if trial not in shrinks], widths, targets, spare)
    return targets, shrinks


def _hand_out(state: State, trials: list[Trial], widths: dict[str, int], targets: dict[str, int], spare: int) -> None:
    """One by one, gives what the floor in StaticFluid left idle to whoever would else end last.

    [10, 1, 1] on 4 devices leaves one idle, two equal trials on 3 leave one; the paper lets them idle.
    """
    heap = [
        (-state.seconds_left(trial, targets[trial.name]), trial.number, trial)
        for trial in trials
        if _may_want(state, trial)
    ]
    heapq.heapify(heap)
    while spare and heap:
        _, number, trial = heapq.heappop(heap)
        wider = targets[trial.name] + 1
        reach = min(state.widest(trial), _reach(state, trial))
        if wider <= reach and state.change_pays(trial, widths[trial.name], wider):
            targets[trial.name] = wider
            spare -= 1
            heapq.heappush(heap, (-state.seconds_left(trial, wider), number, trial))


def _suspend(state: State, idle: int, now: float) -> list[Instruction]:
    """Takes packed trials that can be moved off their devices, one for every idle device where it pays."""
    out: list[Instruction] = []
    for trial in list(map(state.trials.__getitem__, state.running)):
        if len(out) >= idle:
            break
        if trial.kind == "plain" or not _at_rest(trial) or trial.gang > 1 or not state.is_worth_growing(trial):
            continue
        width = state.width(trial)
        tenants = [state.trials[name] for name in state.devices.tenants[trial.devices[0]]]
        if width >= 1 or any(other.status == "suspending" for other in tenants):
            continue
        # Alone it may also grow, which two that share a device cannot.
        reach = min(state.widest(trial), idle) if state.knows_scaling(trial) else 1
        gain = state.seconds_left(trial, width) - state.seconds_left(trial, reach)
        if gain > SUSPEND_FACTOR * state.epsilon:
            state.suspend(trial, now)
            out.append(Suspend(trial.name))
    return out


def _reach(state: State, trial: Trial) -> int:
    """How wide it may get at once: twice as wide, then wait and see, while nobody knows what that brings."""
    width = len(trial.devices)
    if state.knows_scaling(trial):
        return state.widest(trial)
    return 2 * width if width == 1 or trial.speed.count(width) >= TRUSTED else width


def _at_rest(trial: Trial) -> bool:
    """It runs, no resize is under way and none failed a moment ago."""
    return trial.steady and not trial.cooldown


def _may_want(state: State, trial: Trial) -> bool:
    """It would be given more devices if there were any, now or after its first result."""
    return not trial.cooldown and state.is_worth_growing(trial)


def _may_grow(state: State, trial: Trial) -> bool:
    """It is at rest and its speed at the width it has was measured."""
    return _at_rest(trial) and trial.speed.seconds(state.width(trial)) is not None


def _shrink(state: State, trial: Trial, width: int) -> Resize:
    """Keeps the first worker and those nearest to it."""
    home = state.devices.node[trial.devices[0]]
    near = sorted(trial.devices[1:], key=lambda device: state.devices.node[device] != home)
    devices = (trial.devices[0], *near[: width - 1])
    state.promise(trial, devices)
    return Resize(trial.name, devices)

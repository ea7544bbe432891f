"""Decides what starts now, on which devices: StaticFluid's widths, placed in queue order.

Never takes a device from a running trial (that is `resizing`), never packs while a device is idle, never
leaves a device idle that the next trial could use. A trial that needs several whole devices of one node and
is next holds back the idle devices of one node until there are enough.
"""

from __future__ import annotations

import math
from collections import Counter

from fluidtune.engine.messages import Resume, Start
from fluidtune.engine.state import State
from fluidtune.engine.trial import Group, Trial
from fluidtune.engine.wait_queue import Line
from fluidtune.planning import TrialLoad, static_fluid

#: Everything is planned anew when this part of it is new; in between, the new are planned against the whole.
NEW_PART = 0.1
#: A group that was passed over for this many starts per device comes first.
PATIENCE = 4


def place(state: State, now: float) -> list[Start]:
    """Starts everything that can start."""
    out: list[Start] = []
    if not state.waiting or not (state.devices.idle or state.devices.has_open()):
        return out
    _plan(state)
    spare = _spare(state)
    stuck: list[Line] = []
    hold: str | None = None
    held_for: Group | None = None
    while state.devices.idle or state.devices.has_open():
        line = state.waiting.next_line(stuck, PATIENCE * max(1, len(state.devices)))
        if line is None:
            break
        trial = state.trials[line.entries[0][2]]
        devices: tuple[int, ...] = ()
        packing = 1
        # The trial that devices are held back for keeps its place in its group's concurrency, too.
        if state.may_start(line.group) > (line.group is held_for):
            if line.gang > 1:
                devices = tuple(state.devices.pick_node(line.gang, hold) or ())
                if not devices and hold is None:
                    hold = state.node_to_hold(line.gang)
                    held_for = line.group if hold is not None else None
            else:
                devices, packing = _single(state, trial, hold, spare)
        if not devices:
            stuck.append(line)
            continue
        if line.gang == 1:
            spare -= len(devices) - 1
        out.append(start(state, trial, devices, packing, now))
    state.hold = hold
    return out


def hungry(state: State) -> int:
    """How many devices the waiting trials could use at once, if they were free.

    Trials that wait for their group's concurrency, or for a node larger than any there is, are not counted.
    """
    total = 0
    allowed: dict[str, int] = {}
    for line in state.waiting.lines():
        if line.gang > 1 and state.devices.node_to_hold(line.gang) is None:
            continue
        left = allowed.setdefault(line.group.name, state.may_start(line.group))
        count = max(0, min(len(line.entries), left))
        allowed[line.group.name] -= count
        total += count * line.gang
    return total


def start(state: State, trial: Trial, devices: tuple[int, ...], packing: int, now: float) -> Start:
    """A waiting trial starts on ``devices``, as one of up to ``packing`` on the first."""
    instruction = Resume if trial.has_run else Start
    state.occupy(trial, devices, packing, now)
    state.waiting.count_started(trial.group)
    return instruction(trial.name, devices, trial.share)


def _single(state: State, trial: Trial, hold: str | None, spare: int) -> tuple[tuple[int, ...], int]:
    """Devices for a trial that is not a gang, and the packing of the first; () if there are none."""
    packing = _packing(state, trial)
    extra = 0
    if packing == 1 and spare > 0 and planned(state, trial) >= 2 and state.is_worth_growing(trial):
        wanted = min(int(planned(state, trial)), state.widest(trial), 1 + spare)
        if state.change_pays(trial, 1, wanted):
            extra = wanted - 1
    device = state.devices.pick_idle(hold, state.hold, roomiest=extra > 0, homes=trial.homes)
    if device is not None:
        return (device, *state.devices.pick_near(device, extra, hold)), packing
    device = state.pick_share(trial, hold)
    return (() if device is None else (device,)), packing


def _packing(state: State, trial: Trial) -> int:
    """Into how many shares an idle device is divided for it: c if StaticFluid packs it, else as asked."""
    if planned(state, trial) < 1:
        return min(state.packing_limit(trial), max(state.fitting_packing, state.asked_packing(trial)))
    return state.asked_packing(trial)


def _spare(state: State) -> int:
    """Idle devices that remain when everything that waits has got what it was planned, one device at most."""
    idle = len(state.devices.idle) - len(state.claims)
    if len(state.waiting) > idle * state.max_packing:
        return 0  # not worth counting, and most often true
    shares: Counter[int] = Counter()
    for line in state.waiting.lines():
        shares[1] += line.gang * len(line.entries) if line.gang > 1 else 0
        if line.gang == 1:
            shares.update(_packing(state, state.trials[name]) for *_, name in line.entries)
    return max(0, idle - sum(-(-count // packing) for packing, count in shares.items()))


def _plan(state: State) -> None:
    """Gives every waiting trial of a synchronous group its planned width and its place in the queue.

    All these groups are planned as one: the rungs of several brackets share the devices, and each alone would be
    given all of them.
    """
    batch = state.batch
    if not batch or (state.added is not None and state.added <= NEW_PART * len(batch)):
        return
    trials = [trial for trial in map(state.trials.__getitem__, batch) if trial.gang == 1]
    loads = [state.load(trial) for trial in trials]
    d = max((state.widest(trial) for trial in trials), default=1)
    widths = static_fluid(loads, len(state.devices), c=state.fitting_packing, d=d)
    for trial in trials:
        if trial.status == "waiting":
            trial.planned = float(widths[trial.name])
            state.waiting.remove(trial.name)
            state.waiting.put(trial, state.path(trial))
    state.added, state.planned_height = 0, math.fsum(load.height for load in loads)


def planned(state: State, trial: Trial) -> float:
    """Its StaticFluid width; 1 in a group that is no batch."""
    if not trial.group.synchronous:
        return 1.0
    if trial.planned is None:
        rest = TrialLoad("", state.planned_height)
        widths = static_fluid(
            [state.load(trial), rest], len(state.devices), c=state.fitting_packing, d=state.widest(trial)
        )
        trial.planned = float(widths[trial.name])
    return trial.planned

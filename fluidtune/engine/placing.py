"""Decides what starts now and on which devices, and why what waits does not: StaticFluid's widths, placed in the order
of the queue.

It never takes a device from a running trial (that is `resizing`), never lets trials share a device while one is idle,
and never leaves a device idle that the next trial could use. If the next trial needs several whole devices of one node,
the idle devices of one node are held back until there are enough.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import mul

from fluidtune.engine.estimates import TAIL, height, seconds_left, works_left
from fluidtune.engine.messages import Resume, Start
from fluidtune.engine.reasons import Reason, Why, because
from fluidtune.engine.state import State
from fluidtune.engine.trial import Group, Trial
from fluidtune.engine.wait_queue import Line, may_start
from fluidtune.engine.width_rules import asked_slots, change_pays, most_sharing, planned_c, widest
from fluidtune.planning.fluid import static_widths

#: StaticFluid is computed again for all when more than this part of the batch is new. Until then each new trial is
#: planned against the whole.
NEW_PART = 0.1
#: A group that was passed over for this many starts per device goes first.
PATIENCE = 4


def start_waiting(state: State, now: float) -> list[Start]:
    """Starts every waiting trial that can start."""
    out: list[Start] = []
    if not state.waiting or not (state.devices.idle or state.devices.has_open()):
        return out
    _plan_batch(state)
    spare = _spare_devices(state)
    stuck: list[Line] = []
    held_node: str | None = None
    held_for: Group | None = None
    while state.devices.idle or state.devices.has_open():
        line = state.waiting.next_line(stuck, PATIENCE * max(1, len(state.devices)))
        if line is None:
            break
        trial = line.trials[0]
        devices: tuple[int, ...] = ()
        slots = 1
        # The trial that devices are held back for keeps its place in its group's concurrency, too.
        if line.group.places > (line.group is held_for):
            if line.gang > 1:
                devices = tuple(state.devices.pick_on_one_node(line.gang, held_node) or ())
                if not devices and held_node is None:
                    held_node = _node_to_hold(state, line.gang)
                    held_for = line.group if held_node is not None else None
            else:
                devices, slots = _pick_devices(state, trial, held_node, spare)
        if not devices:
            stuck.append(line)
            continue
        if line.gang == 1:
            spare -= len(devices) - 1
        out.append(start_trial(state, trial, devices, slots, now, _why(state, trial, devices)))
    state.held_node = held_node
    return out


def devices_wanted(state: State) -> int:
    """How many devices the waiting trials could use at once if they were free.

    Trials that wait for their group's concurrency, or for more devices of one node than any node has, do not count.
    """
    table = state.devices
    lines = (line for line in state.waiting.lines() if line.gang == 1 or table.node_to_empty(line.gang) is not None)
    return sum(count * line.gang for line, count in may_start(lines))


def why_waits(state: State, line: Line) -> tuple[Reason, dict[str, float]]:
    """Why no trial of ``line`` starts now: what `start_waiting`, which has started what it can, lacks; its numbers."""
    table, group, search = state.devices, line.group, state.search
    if not len(table):
        return Reason.DEVICES_LEAVING if table.leaving else Reason.NO_DEVICE, {}
    if group.places <= 0:
        return Reason.GROUP_FULL, {"at_once": group.concurrency or 0}
    if line.gang > 1 and table.node_to_empty(line.gang) is None:
        return Reason.NODE_SMALL, {"asked": line.gang, "largest": max(table.size.values())}
    if line.gang > 1:
        return Reason.NODE_BUSY, {"asked": line.gang}
    if table.idle:
        return Reason.KEPT_IDLE, {}
    if state.sharing is not None and table.has_open():
        return Reason.NO_ROOM, {}
    if search is not None and search.ended(state.c):
        return Reason.SEARCH_OVER, {"limit": planned_c(state)}
    return Reason.DEVICES_BUSY, {}


def new_waits(state: State) -> list[tuple[int, list[str], Why]]:
    """Lines of the queue whose trials wait for another reason than when this was asked last, or that have new trials.

    Of each: its number, its trials that have come since, and why all of its trials wait.
    """
    out: list[tuple[int, list[str], Why]] = []
    for line in state.waiting.lines():
        found = why_waits(state, line)
        if line.unsaid or found != line.said:
            out.append((line.number, list(line.unsaid), because(found[0], **found[1])))
            line.said, line.unsaid = found, {}
    return out


def start_trial(state: State, trial: Trial, devices: tuple[int, ...], slots: int, now: float, why: Why) -> Start:
    """A waiting trial starts on ``devices``. If the first is idle, it is divided into ``slots``."""
    instruction = Start if trial.past == "new" else Resume
    state.occupy_devices(trial, devices, slots, now)
    state.waiting.count_start(trial.group)
    return instruction(trial.name, devices, trial.share, why=why)


def _why(state: State, trial: Trial, devices: tuple[int, ...]) -> Why:
    """Why a waiting trial starts on ``devices``, which it does not hold yet."""
    table, waiting = state.devices, len(state.waiting)
    if trial.gang > 1:
        return because(Reason.NODE_FREE, waiting=waiting, to=len(devices))
    if len(devices) > 1:
        left, left_to = seconds_left(state, trial, 1), seconds_left(state, trial, len(devices))
        idle = len(table.idle)
        return because(Reason.SPARE_DEVICES, waiting=waiting, idle=idle, to=len(devices), left=left, left_to=left_to)
    (device,) = devices
    there = len(table.tenants[device])
    if not there:
        return because(Reason.FREE_DEVICE, waiting=waiting, idle=len(table.idle))
    return because(Reason.OPEN_SHARE, waiting=waiting, there=there + 1, slots=table.slots[device])


def _node_to_hold(state: State, gang: int) -> str | None:
    """The node to empty for ``gang`` devices: the one that is being emptied already, if it has enough."""
    if state.held_node is not None and state.devices.size.get(state.held_node, 0) >= gang:
        return state.held_node
    return state.devices.node_to_empty(gang)


def _pick_devices(state: State, trial: Trial, held_node: str | None, spare: int) -> tuple[tuple[int, ...], int]:
    """Devices for a trial that is not a gang, and the slots of the first; no devices if none are there.

    ``spare``: how many devices the trial may get beyond the first.
    """
    slots = _slots(state, trial)
    extra = 0
    if slots == 1 and spare > 0 and _planned_width(state, trial) >= 2 and trial.worth_growing:
        wanted = min(int(_planned_width(state, trial)), widest(state, trial), 1 + spare)
        if change_pays(state, trial, 1, wanted):
            extra = wanted - 1
    device = state.devices.pick_idle(held_node, state.held_node, roomiest=extra > 0)
    if device is not None:
        return (device, *state.devices.pick_near(device, extra, held_node)), slots
    device = _pick_open(state, trial, held_node)
    return (() if device is None else (device,)), slots


def _pick_open(state: State, trial: Trial, forbid: str | None) -> int | None:
    """A shared device with a free slot for ``trial``, not on node ``forbid``; None if there is none."""
    open_devices = state.devices.open_devices(most_sharing(state, trial), forbid)
    if state.sharing is None:
        return next(open_devices, None)
    return state.sharing.choose_device(trial, {device: state.tenants_of(device) for device in open_devices})


def _slots(state: State, trial: Trial) -> int:
    """Into how many slots an idle device is divided for it: c if StaticFluid gives it a share, else as it asked."""
    if _planned_width(state, trial) < 1:
        return min(most_sharing(state, trial), max(planned_c(state), asked_slots(state, trial)))
    return asked_slots(state, trial)


def _spare_devices(state: State) -> int:
    """Idle devices that are left when every waiting trial has got its slots, and one device at most."""
    idle = len(state.devices.idle) - len(state.claims)
    if len(state.waiting) > idle * state.c:
        return 0  # not worth counting, and most often true
    trials: Counter[int] = Counter()  # by slots of their device
    for line in state.waiting.lines():
        if line.gang > 1:
            trials[1] += line.gang * len(line.trials)
        else:
            trials.update(_slots(state, trial) for trial in line.trials)
    return max(0, idle - sum(-(-count // slots) for slots, count in trials.items()))


def _plan_batch(state: State) -> None:
    """Gives every waiting trial of a synchronous group its planned width and its place in the queue.

    All synchronous groups are planned as one. The rungs of several brackets share the devices, and StaticFluid for each
    alone would give it all of them.
    """
    batch = state.batch
    if not batch or (state.new_in_batch is not None and state.new_in_batch <= NEW_PART * len(batch)):
        return
    waiting: list[Trial] = []
    heights: list[float] = []
    for line in state.waiting.lines():
        if line.group.synchronous and line.gang == 1:
            waiting += line.trials
            lefts, bases = works_left(state, line.group, line.trials)
            heights += map(mul, lefts, bases)
            tail = TAIL * line.group.tail
            state.waiting.reorder(line, [(left + tail) * base for left, base in zip(lefts, bases, strict=True)])
    started = [trial for name in state.running if (trial := state.trials[name]).name in batch and trial.gang == 1]
    heights += [height(state, trial) for trial in started]
    d = _widest_of(state, waiting + started)
    widths = static_widths(heights, len(state.devices), c=planned_c(state), d=d)
    for trial, width in zip(waiting, widths, strict=False):
        trial.planned = float(width)
    state.new_in_batch, state.batch_height = 0, math.fsum(heights)


def _widest_of(state: State, trials: list[Trial]) -> int:
    """The largest d of any of these trials; 1 without trials."""
    growing = [trial for trial in trials if trial.can_grow]
    # The beta of trials that have not run is their group's: one trial for each group is enough.
    fresh = {trial.group: trial for trial in growing if trial.past == "new"}
    run = [trial for trial in growing if trial.past != "new"]
    return max((widest(state, trial) for trial in (*fresh.values(), *run)), default=1)


def _planned_width(state: State, trial: Trial) -> float:
    """Its StaticFluid width; 1 in an asynchronous group."""
    if not trial.group.synchronous:
        return 1.0
    if trial.planned is None:
        c, d = planned_c(state), widest(state, trial)
        heights = [height(state, trial), state.batch_height]
        trial.planned = float(static_widths(heights, len(state.devices), c=c, d=d)[0])
    return trial.planned

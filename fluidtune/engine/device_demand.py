"""Which devices the job could use beyond those that its trials hold: for a source that gets devices when they are used.

It decides nothing and changes nothing. It answers what the engine would do next if it had more devices: which waiting
trials would start, and how far running trials would grow. A source (`fluidtune.cluster.devices.holding`) decides
which devices to ask the cluster for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fluidtune.engine.resizing import next_width, worth_a_device
from fluidtune.engine.state import State
from fluidtune.engine.trial import ROUNDING
from fluidtune.engine.wait_queue import may_start
from fluidtune.engine.width_rules import change_pays


@dataclass(frozen=True)
class DeviceDemand:
    """What the job could use.

    ``starting``: the trials that wait and would start, by the number of whole devices that each needs on one node.
    Trials that share a device by what they ask for count as one. Trials that wait for their group's concurrency do not
    count. ``growing``: the devices to which trials would grow or be moved if they were idle; 0 while a trial waits.
    ``grown``: the devices that trials hold or were promised beyond their first ones. ``claimed``: how many idle
    devices are for trials that leave the device that they share.
    """

    starting: Mapping[int, int] = field(default_factory=dict)
    growing: int = 0
    grown: tuple[int, ...] = ()
    claimed: int = 0


def device_demand(state: State, room: int) -> DeviceDemand:
    """The demand after the last decision. ``room``: the number of devices for which growth is worth a thought."""
    starting = _starting(state)
    grown = tuple(device for name in state.wide for device in state.trials[name].held[1:])
    promised = tuple(
        device
        for name in state.running
        if name not in state.wide and state.trials[name].gang == 1
        for device in state.trials[name].held[1:]
    )
    growing = 0 if starting else _growing(state, room)
    claimed = sum(1 for name in state.claims if state.trials[name].status == "suspending")
    return DeviceDemand(starting, growing, grown + promised, claimed)


def with_arrivals(demand: DeviceDemand, shares: Collection[float]) -> DeviceDemand:
    """The demand with trials that have arrived and that the engine does not know yet, by what each asks for.

    A source that asks for their devices now has them before the engine decides whether these trials share devices.
    """
    if not shares:
        return demand
    starting = Counter(demand.starting)
    for share, count in Counter(shares).items():
        if share > 1:
            starting[int(share)] += count
        else:
            starting[1] += -(-count // int(1 / share + ROUNDING))
    return DeviceDemand(dict(starting), 0, demand.grown, demand.claimed)


def _starting(state: State) -> dict[int, int]:
    trials: Counter[int] = Counter()
    for line, count in may_start(state.waiting.lines()):
        if count:
            trials[line.gang] += -(-count // line.trials[0].slots_by_share)
    return dict(trials)


def _growing(state: State, room: int) -> int:
    """`DeviceDemand.growing`, at most ``room``."""
    total = len(worth_a_device(state, room))
    for name in state.running:
        if total >= room:
            break
        trial = state.trials[name]
        width = len(trial.devices)
        wider = next_width(state, trial, width + room - total)
        if wider > width and change_pays(state, trial, width, wider):
            total += wider - width
    return min(total, room)

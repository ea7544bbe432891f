"""Which trials fit together on a device: pure functions for a caller that places trials.

Trials fit by memory if 2.1 holds with each of them alone in a lane, so that none waits for another. Among devices with
the memory, a trial goes where the trials together keep the device busy least. Nothing is admitted here; the device's
lane service does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from salus_share.lanes import Amount, LaneTable, amount
from salus_share.messages import Need
from salus_share.policies import Policy, Standing
from salus_share.turns import next_turn, served

Device = TypeVar("Device")

#: How many trials a device has room for, whatever they need: the number of seats in its seat table.
SEATS = 64
#: How many turns for each trial `shares` follows a lane, and how long a turn is taken to be, in seconds: so short that
#: it brings no trial nearer to its end. The turns of the policies here repeat after one round.
_ROUNDS, _MOMENT_S = 12, 1e-9


def fit_together(needs: Iterable[Need], capacity: Amount, *, own_lanes: bool = True) -> bool:
    """Whether trials with these needs can be on a device of ``capacity`` bytes together.

    ``own_lanes``: whether each must be alone in its lane, so that all run at once. Else they may take turns.
    """
    # The largest E comes first: every later trial finds a lane that is large enough.
    ordered = sorted(needs, key=lambda need: -amount(need.ephemeral, "ephemeral memory"))
    lanes = divide({str(index): need for index, need in enumerate(ordered)}, capacity)
    return lanes is not None and (not own_lanes or len(lanes) == len(ordered))


def busy(needs: Iterable[Need]) -> float:
    """The sum of the trials' ``compute``. Without a ``compute`` one counts as 1: it may be busy always."""
    return math.fsum(1.0 if need.compute is None else need.compute for need in needs)


def divide(needs: Mapping[str, Need], capacity: Amount, *, max_lanes: int | None = None) -> list[list[str]] | None:
    """The lanes of trials that came to a device in this order. None: they do not fit together, even in one lane."""
    # Algorithm 2.1 opens lanes while it can. One lane for all needs the least memory.
    for most in (max_lanes, 1):
        table = LaneTable(capacity, most)
        if all(table.admit(name, need.persistent, need.ephemeral) is not None for name, need in needs.items()):
            return [list(lane.jobs) for lane in table.lanes.values()]
    return None


def shares(chosen: Policy, lanes: Iterable[Mapping[str, Standing]]) -> dict[str, float]:
    """The part of a device that each trial gets in the long run. The parts sum to 1.

    ``lanes``: by lane, the standings of its trials. Lanes run at the same time and get equal parts. Within a lane, the
    parts are those that the policy gives to trials that are always ready and whose iterations are equally long. Under
    SRTF the first trial gets all of it.
    """
    divided = [dict(lane) for lane in lanes if lane]
    out: dict[str, float] = {}
    for lane in divided:
        standings = {name: replace(standing, service=0.0, last_turn=0) for name, standing in lane.items()}
        turns = _ROUNDS * len(lane)
        got = dict.fromkeys(lane, 0)
        for turn in range(1, turns + 1):
            name = next_turn(chosen, standings)
            assert name is not None
            got[name] += 1
            standings[name] = served(standings[name], _MOMENT_S, turn)
        out.update({name: float(Fraction(count, turns * len(divided))) for name, count in got.items()})
    return out


def choose_device(
    need: Need, devices: Mapping[Device, Sequence[Need]], capacity: Amount, *, own_lanes: bool = True
) -> Device | None:
    """The device that a trial should share; None if none has the memory. ``devices``: the needs of the trials on each.

    It is the device whose trials are `busy` least; of several, the one with the most memory in use. ``own_lanes`` is as
    in `fit_together`. docs/salus.md has what other rules gave on recorded pairs.
    """
    best: tuple[tuple[float, float], Device] | None = None
    for device, residents in devices.items():
        together = [*residents, need]
        if not fit_together(together, capacity, own_lanes=own_lanes):
            continue
        held = sum(float(other.persistent) + float(other.ephemeral) for other in residents)
        rank = (busy(residents), -held)
        if best is None or rank < best[0]:
            best = (rank, device)
    return None if best is None else best[1]

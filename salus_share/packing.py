"""Which device a trial joins, and what part of it each trial gets: pure functions for a caller that places trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from salus_share.lanes import Bytes, LaneTable, Need
from salus_share.policies import Policy, Standing
from salus_share.turns import next_turn, served

Device = TypeVar("Device")

#: How many trials a device has room for, whatever they need: the number of seats in its seat table.
SEATS = 64
#: How many turns for each trial `shares` follows a lane, and how long a turn is taken to be, in seconds: so short that
#: it brings no trial nearer to its end. The turns of the policies here repeat after one round.
_ROUNDS, _MOMENT_S = 12, 1e-9


def busy(needs: Iterable[Need]) -> float:
    """The sum of the trials' ``compute``. Without a ``compute`` one counts as 1: it may be busy always."""
    return math.fsum(1.0 if need.compute is None else need.compute for need in needs)


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


def choose_device(need: Need, devices: Mapping[Device, tuple[LaneTable, Sequence[Need]]]) -> Device | None:
    """The device that a trial should share; None if none has the memory.

    ``devices``: the lanes of each, and the needs of its trials. It is one where the trial gets a lane of its own, or
    else one of all; of these, the one whose trials are `busy` least; of several, the one with the most memory in use.
    docs/salus.md has what other rules gave on recorded pairs.
    """
    best: tuple[tuple[bool, float, Bytes], Device] | None = None
    for device, (table, residents) in devices.items():
        lane = table.find(need.persistent, need.ephemeral)
        if lane is None:
            continue
        rank = (lane in table.lanes, busy(residents), -table.reserved)
        if best is None or rank < best[0]:
            best = (rank, device)
    return None if best is None else best[1]

"""Which trials fit together on a device: pure answers for whoever places trials.

By memory (2.1, every trial in a lane of its own, so that none waits for another) and by compute (their iterations
together keep the device busy no more than all of the time, so that none stretches another). Nothing is admitted
here; the device's lane service does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from salus_share.errors import SalusError
from salus_share.lanes import Amount, LaneTable, amount
from salus_share.messages import Need

Device = TypeVar("Device")

#: By how much the trials of a device may be stretched before placement calls it crowded: 5 %.
STRETCH = 1.05


def packing_limit(need: Need, capacity: Amount) -> int:
    """c by memory: how many trials of this need run at once on ``capacity`` bytes, each in a lane of its own.

    At least 1. Raises SalusError if not even one fits.
    """
    each = amount(need.persistent, "persistent memory") + amount(need.ephemeral, "ephemeral memory")
    whole = amount(capacity, "capacity")
    if each > whole:
        raise SalusError(f"a trial of {each} bytes does not fit on a device of {whole}; use a larger one")
    if each == 0:
        raise SalusError("a trial of 0 bytes fits any number of times; profile it first")
    return int(whole // each)


def fit_together(needs: Iterable[Need], capacity: Amount, *, own_lanes: bool = True) -> bool:
    """Whether these trials can be on a device of ``capacity`` bytes together.

    ``own_lanes``: each in a lane of its own (all run at once); else sharing lanes will do (they take turns).
    """
    table = LaneTable(capacity)
    # Largest E first: what comes later finds a lane that is large enough.
    ordered = sorted(needs, key=lambda need: -amount(need.ephemeral, "ephemeral memory"))
    lanes = [table.admit(str(index), need.persistent, need.ephemeral) for index, need in enumerate(ordered)]
    if own_lanes:
        return None not in lanes and len(set(lanes)) == len(lanes)
    if None not in lanes:
        return True
    # Algorithm 2.1 opens lanes while it can; one lane for all is what takes least.
    narrow = LaneTable(capacity, max_lanes=1)
    return all(narrow.admit(str(i), need.persistent, need.ephemeral) is not None for i, need in enumerate(ordered))


def stretch(needs: Iterable[Need]) -> float:
    """By how much trials that run at once slow each other: the sum of their ``compute``, at least 1.

    A need without ``compute`` counts as 1: it may keep the device busy all the time.
    """
    return max(1.0, math.fsum(1.0 if need.compute is None else need.compute for need in needs))


def choose_device(need: Need, devices: Mapping[Device, Sequence[Need]], capacity: Amount) -> Device | None:
    """The device that a trial should share, of those with their trials' needs; None: none has the memory.

    An occupied device where nobody is stretched by more than `STRETCH`, the fullest first; else an empty one; else
    the one where trials stretch each other least.
    """
    best: tuple[tuple[float, float], Device] | None = None
    for device, residents in devices.items():
        together = [*residents, need]
        if not fit_together(together, capacity):
            continue
        slower = stretch(together)
        crowded = 0.0 if slower <= STRETCH and residents else slower
        held = sum(float(other.persistent) + float(other.ephemeral) for other in residents)
        rank = (crowded, -held)
        if best is None or rank < best[0]:
            best = (rank, device)
    return None if best is None else best[1]

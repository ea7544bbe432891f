"""Stages: the layers of a model are cut into a pipeline whose largest stage takes the fewest seconds.

Source: AlpaServe, section 4.1: F(s, k) = min over i of max(F(s-1, i-1), l_i + ... + l_k). Without a backward pass a
stage takes the sum of its layers' seconds, so K layers are measured once each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from symphony_serve.errors import ServeError

#: Bytes.
GIB = 2**30


def cut_layers(
    seconds: Sequence[float], stages: int, weights: Sequence[float] | None = None, room: float = math.inf
) -> list[range]:
    """The layers of each stage, with at least one layer in each. It takes O(stages * layers^2) steps.

    Of cuts with the same largest stage, the one with the smallest sum of squares of the stages' seconds is taken, and
    of those the one that cuts earliest. weights: bytes of each layer, of which no stage has more than ``room``.

    Raises ServeError if there are fewer layers than stages, or if no cut keeps to the room.
    """
    count = len(seconds)
    if not 1 <= stages <= count:
        raise ServeError(f"{count} layers are to be cut into {stages} stages; give 1 to {count} stages")
    before = [0.0, *accumulate(seconds)]
    held = [0.0, *accumulate(weights if weights is not None else [0.0] * count)]
    # Of the first k layers in s stages: largest stage, sum of squares, first layers of the stages.
    Cut = tuple[float, float, tuple[int, ...]]
    best: dict[int, Cut] = {0: (0.0, 0.0, ())}
    for stage in range(1, stages + 1):
        found: dict[int, Cut] = {}
        for last in range(stage, count - stages + stage + 1):
            options = []
            for first in range(stage - 1, last):
                if first in best and held[last] - held[first] <= room:
                    largest, squares, cuts = best[first]
                    length = before[last] - before[first]
                    options.append((max(largest, length), squares + length**2, (*cuts, first)))
            if options:
                found[last] = min(options)
        best = found
    if count not in best:
        said = f"{count} layers with {held[-1] / GIB:.3g} GiB of weights do not fit into {stages} stages"
        raise ServeError(f"{said} of {room / GIB:.3g} GiB each; give more stages or more room")
    starts = best[count][2]
    return [range(first, end) for first, end in zip(starts, (*starts[1:], count), strict=True)]

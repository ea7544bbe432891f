"""Which models are packed together: groups of up to four, so that compute-heavy ones meet memory-heavy ones.

A model's *lean* is its mean need of compute less that of memory. Two models suit each other if their leans cancel out.
The rules are USHER's (OSDI'24), paired as docs/placement.md says.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.placement.needs import Need

#: Pairs are paired this often, so a group has at most 4 models. Source: USHER (its p).
PASSES = 2
#: Compute is heavy from this multiple of memory on, and the other way round. Source: USHER.
HEAVY = 1.2


def heavy(need: Need) -> str:
    """ "compute", "memory", or "neither"."""
    if need.compute >= HEAVY * need.memory:
        return "compute"
    return "memory" if need.memory >= HEAVY * need.compute else "neither"


def pair_up(leans: Sequence[float]) -> list[tuple[int, ...]]:
    """The pairs of positions with the least sum of ``|a + b|``. Of an odd number, one is alone: its mate would be 0.

    Sorted and paired from the ends inward: for a <= b <= c <= d the sums a + d and b + c lie within those of any other
    pairing with the same total, and ``|x|`` is convex.
    """
    order: list[int | None] = [*sorted(range(len(leans)), key=lambda one: leans[one])]
    if len(order) % 2:
        order.insert(sum(lean < 0 for lean in leans), None)
    half = len(order) // 2
    pairs = zip(order[:half], order[: half - 1 : -1], strict=True)
    return [tuple(one for one in pair if one is not None) for pair in pairs]


def groups(needs: Sequence[Sequence[Need]]) -> list[tuple[int, ...]]:
    """Groups of models, by their numbers. needs: of each model at the batches that fit."""
    leans = [sum(one.compute - one.memory for one in its) / len(its) for its in needs]
    found: list[tuple[int, ...]] = [(number,) for number in range(len(needs))]
    for _ in range(PASSES):
        sums = [sum(leans[number] for number in group) for group in found]
        found = [tuple(number for at in pair for number in found[at]) for pair in pair_up(sums)]
    return sorted(tuple(sorted(group)) for group in found)

"""A placement for devices that hold models already: it is searched, completed, and given to the devices that have most.

Here each device is one GPU, and holds models whole. The search is that of `search`. What it leaves out because nobody
asks for it stands somewhere all the same, if there is room, and a placement that is hardly better is not worth the
loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from symphony_serve.errors import ServeError
from symphony_serve.placement.arrivals import drawn
from symphony_serve.placement.search import MOST_GPUS, Search
from symphony_serve.placement.selection import evaluate
from symphony_serve.placement.served_models import Group, ServedModel, Shape
from symphony_serve.placement.simulator import Simulator
from symphony_serve.placement.stages import GIB

ALONE = Shape(1, 1)
#: Requests of a search while a service runs. Judgement: by chance alone their attainment is off by .004 where it is .9,
#: less than `GAIN`; and a sixth of `arrivals.SAMPLE` takes a sixth of its time from the service's processor.
SAMPLE = 5000
#: A placement that attains more by at most this part is not taken. Source: 1 point, as in the spec of AlpaServe here.
GAIN = 0.01
#: Requests/s of a model that nobody asks. Judgement: so that its SLO counts at all.
LEAST_RATE = 1e-3

Placement = dict[int, frozenset[str]]


def replanned(
    models: Sequence[ServedModel],
    rates: Mapping[str, float],
    cvs: Mapping[str, float],
    held: Mapping[int, frozenset[str]],
    memory: float,
    over: Callable[[], bool],
) -> tuple[Placement, float]:
    """Where the models are to stand, and the part of the requests that is answered in time there, by simulation.

    models: each with a cut for one GPU. rates: requests/s, cvs: of their gaps, both by name. held: by device, what it
    holds now. memory: bytes of each device; if not all models have room, some stand nowhere. over: the search ends when
    this says so, and a placement is there. Raises ServeError if a model fits no device, or if no number of them bears
    the rates.
    """
    if not held:
        raise ServeError("there is no device to place models on")
    for one in models:
        size = one.cuts[ALONE].bytes
        if size > memory:
            raise ServeError(
                f"model {one.name} has {size / GIB:.3g} GiB, and a device {memory / GIB:.3g} GiB, so it fits none; "
                "give larger devices"
            )
    asked = [max(rates.get(one.name, 0.0), LEAST_RATE) for one in models]
    needed = sum(rate * one.gpu_seconds for rate, one in zip(asked, models, strict=True))
    if needed > MOST_GPUS:
        raise ServeError(f"the rates keep {needed:.0f} devices busy, more than {MOST_GPUS}; ask for smaller rates")
    requests = drawn(asked, [cvs.get(one.name, 1.0) for one in models], SAMPLE)
    search = Search(models, len(held), memory, requests)
    for _ in search.steps():
        if search.best.groups and over():
            break
    sizes = {one.name: one.cuts[ALONE].bytes for one in models}
    names = [one.name for one in models]
    groups = [frozenset(names[at] for at in group.models) for group in search.best.groups]
    groups = _complete(groups, sizes, len(held), memory)
    simulator = Simulator(models, requests)

    def attained(placement: Sequence[frozenset[str]]) -> float:
        chosen = [Group(ALONE, tuple(names.index(name) for name in sorted(one))) for one in placement if one]
        return evaluate(simulator, chosen).attainment

    found = attained(groups)
    if any(held.values()):
        # What is held, and beside it what stands nowhere.
        kept = _with_missing(list(held.values()), sizes, memory)
        may_stay = _hold_all(kept, sizes) or not _hold_all(groups, sizes)
        if may_stay and found - (now := attained(kept)) <= GAIN:
            return dict(zip(held, kept, strict=True)), now
    return _given(groups, held, sizes), found


def _complete(
    groups: Sequence[frozenset[str]], sizes: Mapping[str, float], count: int, memory: float
) -> list[frozenset[str]]:
    """``count`` groups in which each model stands; if they are not found to have room, those that were searched."""
    found = _with_missing([*groups, *[frozenset[str]()] * (count - len(groups))], sizes, memory)
    # Without the replicas.
    packed = _with_missing([frozenset[str]()] * count, sizes, memory, tightly=True)
    if _hold_all(found, sizes) or not _hold_all(packed, sizes):
        return found
    # And with those replicas of the search that still have room.
    for wanted in groups:
        at = max(range(count), key=lambda one: sum(sizes[name] for name in packed[one] & wanted))
        for model in sorted(wanted - packed[at]):
            if sum(sizes[name] for name in packed[at]) + sizes[model] <= memory:
                packed[at] |= {model}
    return packed


def _hold_all(groups: Sequence[frozenset[str]], sizes: Mapping[str, float]) -> bool:
    return frozenset().union(*groups) == sizes.keys()


def _with_missing(
    groups: Sequence[frozenset[str]], sizes: Mapping[str, float], memory: float, tightly: bool = False
) -> list[frozenset[str]]:
    """The groups, with each model that is in none put where most room is, or in the first with room if ``tightly``.

    The largest model goes first. One for which there is no room is left out.
    """
    found = list(groups)
    for model in sorted(sizes.keys() - frozenset().union(*found), key=lambda one: (-sizes[one], one)):
        taken = [sum(sizes[name] for name in group) for group in found]
        possible = [at for at, used in enumerate(taken) if used + sizes[model] <= memory]
        if possible:
            found[possible[0] if tightly else min(possible, key=taken.__getitem__)] |= {model}
    return found


def _given(
    groups: Sequence[frozenset[str]], held: Mapping[int, frozenset[str]], sizes: Mapping[str, float]
) -> Placement:
    """Each group to a device, so that little has to be loaded: the pair with the most bytes in common first."""
    found: Placement = {}
    left = list(groups)
    while left:
        device, group = max(
            ((device, group) for device in held.keys() - found.keys() for group in left),
            key=lambda pair: (sum(sizes[name] for name in pair[1] & held[pair[0]]), sorted(pair[1]), -pair[0]),
        )
        found[device] = group
        left.remove(group)
    return found

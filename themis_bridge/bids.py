"""What an app bids: which subsets of an offer it lists, and its rho with each.

An offer of 256 GPUs has 2^256 subsets, too many to list. To an app it only matters how many GPUs it gets and how many
of them are on one machine. So it lists one subset for each size of a ladder and each width of gang that its jobs could
run in, as dense as the offer allows. `benchmarks.auction` measures what is lost against a bid on all subsets;
benchmarks/themis.md has the figure. Nothing is decided here about other apps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from themis_bridge.auction import Bid, shape
from themis_bridge.fairness import endless_rho
from themis_bridge.locality import GUESSES, Gpu, Phase, whole_gangs

#: Up to this size every size is listed; beyond it there are four sizes from each power of two to the next. A shorter
#: table makes the auction faster; `benchmarks.auction` measures what it loses.
ALL_SIZES_TO = 8


def ladder(most: int) -> list[int]:
    """The sizes that a bid lists: all up to `ALL_SIZES_TO`, then fewer, and ``most`` itself."""
    sizes = [size for size in range(1, min(ALL_SIZES_TO, most) + 1)]
    step = 2
    while sizes and sizes[-1] < most:
        sizes += [min(size, most) for size in range(sizes[-1] + step, 2 * sizes[-1] + 1, step) if size - step < most]
        step *= 2
    return sizes


@dataclass
class Valuation:
    """One app's rho for any set of GPUs that it would hold from now until it is done (eq. 1 and 2).

    phases: the work left, the running phase first.
    elapsed: seconds since the app arrived.
    independent: T_id, s.
    across: its S on GPUs of several machines, and of several racks.
    most: how many GPUs the app wants at most; None for all that its jobs can use.
    together: how many GPUs of one machine each trial needs at once, see `messages.Heartbeat`; others are of no use.
    """

    phases: Sequence[Phase]
    elapsed: float
    independent: float
    across: tuple[float, float] = GUESSES
    most: int | None = None
    together: int = 1

    @property
    def work(self) -> float:
        """All work left, GPU seconds."""
        return sum(phase.work for phase in self.phases)

    @property
    def demand(self) -> int:
        """The most GPUs that any phase left can use."""
        return max((phase.demand for phase in self.phases), default=0)

    @property
    def useful(self) -> int:
        """The most GPUs that the running phase can use; more would idle until the next phase."""
        useful = next((phase.demand for phase in self.phases if phase.work), 0)
        if self.most is not None:
            useful = min(useful, self.most)
        return useful - useful % self.together

    @property
    def gang(self) -> int:
        """The widest job's GPUs, rounded up to a power of two."""
        width = max((phase.widest for phase in self.phases), default=1)
        return 1 << (width - 1).bit_length()

    def finish(self, held: Iterable[Gpu], pieces: Mapping[int, int] | None = None, racks: Iterable[str] = ()) -> float:
        """Seconds from now until the app is done.

        ``pieces``: GPUs beside those that it would hold: size of a piece that lies on one machine -> number of pieces.
        ``racks``: where the pieces are.
        """
        held = list(held)
        counts = list(Counter(gpu.machine for gpu in held).values())
        for size, number in (pieces or {}).items():
            counts += [size] * number
        places = {gpu.rack for gpu in held}.union(racks)
        across = self.across[len(places) > 1]
        counts = [count - count % self.together for count in counts]
        return sum(phase.time(counts, across) for phase in self.phases)

    def rho(self, held: Iterable[Gpu], pieces: Mapping[int, int] | None = None, racks: Iterable[str] = ()) -> float:
        """Finish-time fairness with those GPUs until the end; arguments as of `finish`."""
        return (self.elapsed + self.finish(held, pieces, racks)) / self.independent


@dataclass(frozen=True)
class Endless:
    """What GPUs are worth to an app that never ends, such as a service, see `fairness.endless_rho`.

    useful: GPUs that its load wants now, >= 1. share: its share of the cluster, R_C / N_avg, GPUs.
    gang, together: as of `Valuation`; each of its GPUs works alone.
    """

    useful: int
    share: float
    gang: int = 1
    together: int = 1

    def rho(self, held: Iterable[Gpu], pieces: Mapping[int, int] | None = None, racks: Iterable[str] = ()) -> float:
        """As `Valuation.rho`; places change nothing."""
        more = sum(size * number for size, number in (pieces or {}).items())
        return endless_rho(self.useful, self.share, len(list(held)) + more)


def make_bid(
    app: str,
    valuation: Valuation | Endless,
    held: Iterable[Gpu],
    offer: Iterable[Gpu],
    most: int | None = None,
    own: Container[str] = (),
) -> Bid:
    """The app's bid for an offer.

    Args:
        held: the GPUs that it keeps whatever the outcome.
        most: its quota, the most GPUs that it may hold in all; None if it has none.
        own: ids of the GPUs on offer that it holds until their leases end; it lists these first, so as not to move.
    """
    held, offer = list(held), list(offer)
    near = Counter(gpu.machine for gpu in held)
    near.update(gpu.machine for gpu in offer if gpu.id in own)
    together = valuation.together
    room = valuation.useful - whole_gangs(held, together)
    if most is not None:
        room = min(room, most - len(held))
    table: dict[frozenset[str], float] = {frozenset(): valuation.rho(held)}
    kinds: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in offer:
        kinds[gpu.kind].append(gpu)
    for of_kind in kinds.values():
        machines: dict[str, list[Gpu]] = defaultdict(list)
        for gpu in sorted(of_kind, key=lambda gpu: (gpu.id not in own, gpu.id)):
            machines[gpu.machine].append(gpu)
        # First the machines where it has most GPUs, then, rack by rack, those with most GPUs on offer.
        order = sorted(machines.values(), key=lambda free: (-near[free[0].machine], free[0].rack, -len(free)))
        racks = {gpu.rack for gpu in of_kind}
        gang = valuation.gang
        while gang >= together:
            pieces = [free[i : i + gang] for free in order for i in range(0, len(free) - gang + 1, gang)]
            for number in ladder(min(len(pieces), room // gang)):
                row = [gpu for piece in pieces[:number] for gpu in piece]
                counts = Counter(gpu.machine for gpu in row)
                rho = valuation.rho(held, shape(counts.values(), valuation.gang), racks)
                table[frozenset(gpu.id for gpu in row)] = rho
            gang //= 2
    empty = table[frozenset()]
    # No set is worse than none, because the app could leave it idle.
    return Bid(app, {row: min(rho, empty) for row, rho in table.items()}, valuation.gang, together)

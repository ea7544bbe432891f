"""Whether others than the arbiter's apps have given resources of the Ray cluster back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

#: Seconds without a call of Ray that is due, and without a change of what is leased, before what others hold is
#: computed. Judgement: Ray's own count of what is taken is older than the calls, by less than a second.
QUIET_S = 3.0


class Others:
    """What they held at the last look. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._quiet_since = clock()
        self._held: dict[str, float] = {}

    def busy(self) -> None:
        """Reservations are being made or removed, or none waits for others."""
        self._quiet_since, self._held = self._clock(), {}

    def worth_a_look(self) -> bool:
        """Whether Ray's count and the arbiter's are of the same moment."""
        return self._clock() - self._quiet_since >= QUIET_S

    def freed(self, taken: Mapping[str, float], ours: Iterable[Mapping[str, float]], wanted: Collection[str]) -> bool:
        """Whether they hold less than at the last look. All by Ray resource, in its unit.

        Args:
            taken: what is taken in the cluster.
            ours: the bundles of the reservations that exist.
            wanted: the resources that apps ask for.
        """
        bundles = list(ours)
        held = {name: taken.get(name, 0.0) - sum(each.get(name, 0.0) for each in bundles) for name in wanted}
        # 0.001 is ten of Ray's smallest units: not a difference, but a sum of rounding errors.
        freed = any(held[name] < before - 1e-3 for name, before in self._held.items() if name in held)
        self._held = held
        return freed

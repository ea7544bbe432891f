"""A model's profile, corrected by the batches that were seen. All times are seconds.

A profile that was measured at load is soon wrong: others use the machine, its clock changes, inputs differ. What is
kept of a batch is its *stretch*: its seconds divided by those of the first profile. The profile of now is the first
one, made longer by a high quantile of what the latest batches of about that size have taken more. Whether that is a
factor or a number of seconds cannot be known of a size that was not seen. The less of both is said, so that the size is
tried.

On a device that others use as well, a batch first waits for its turn. How long does not depend on its size. So the
longest of the latest waits is added to each size: a batch that is to start at some moment is sent that much sooner.

The stretches also say by how much the times of batches of about one size vary, see `SeenTimes.variation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from symphony_serve.profiles import Profile

#: The part of the batches that take no longer than the profile says. A batch that takes longer makes its requests late,
#: a profile that is too long makes batches small (`python -m benchmarks.serve_real --only quantiles`).
QUANTILE = 0.98
#: The number of the latest batches that count: some seconds under load.
RECENT = 256
#: The part of the batches that wait no longer. Source: of a model's requests, 1 % may be late (section 5.1).
WAIT_QUANTILE = 0.99
#: A size range of which fewer than this were seen is at least as slow as all sizes together make it.
ENOUGH = 10
#: It is not said to vary when fewer were seen: five of them are then the tenth that takes longer. Judgement.
ENOUGH_TO_VARY = 50
#: The profile is made anew after this many batches, or seconds of batches. The 0.1 ms of work are then at most 6 us a
#: batch, or 0.2 % of the time.
EVERY, EVERY_S = 16, 0.05
#: The profile stays while no entry would change by more than this part.
CHANGE = 0.02


def high_quantile(values: list[float], quantile: float) -> float:
    """The value that the part 1 - ``quantile`` exceeds."""
    return sorted(values)[min(len(values) - 1, int(quantile * len(values)))]


class SeenTimes:
    """Corrects the profile of one model.

    first: the profile that was measured at load. slowest: the longest seconds of a batch of 1 that the profile may say.
    Without that limit, a model that was too slow for a while would refuse all requests, run no batch, and so never
    find out that it has become faster. For requests that have less time than that, there is `tried`.
    """

    def __init__(self, first: Profile, slowest: float):
        self._first = self.profile = first
        #: The seconds that half of the latest batches have taken at most, without waits: a row of batches takes their
        #: sum, and not the sum of what few exceed. It is made anew with the profile.
        self.usual = first
        self._slowest = slowest
        #: (size, stretch) of the latest batches.
        self.latest: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._batches, self._seconds = 0, 0.0

    def add(self, size: int, seconds: float, waited: float = 0.0) -> Profile | None:
        """A batch of ``size`` took ``seconds``, after it had ``waited`` for its turn.

        Returns the new profile if it has changed, else None.
        """
        self.latest.append((size, seconds / self._first.seconds(size)))
        self._waits.append(waited)
        seconds += waited
        self._batches += 1
        self._seconds += seconds
        if self._batches < EVERY and self._seconds < EVERY_S:
            return None
        self._batches, self._seconds = 0, 0.0
        made = self._stretched(QUANTILE, self.longest_wait)
        pairs = zip(made.table[1:-1], self.profile.table[1:-1], strict=True)
        if all(abs(new - old) <= CHANGE * old for new, old in pairs):
            return None
        usual = self._stretched(0.5, 0.0)
        if made.parts is not None:  # The next batch can start after a part of what a batch usually takes.
            sizes = range(1, made.max_batch + 1)
            parts = [made.part(size) * min(1.0, usual.seconds(size) / made.seconds(size)) for size in sizes]
            made = made.in_stages(parts)
        self.profile, self.usual = made, usual
        return made

    def _stretched(self, quantile: float, wait: float) -> Profile:
        """The first profile as the latest batches correct it, and a wait."""
        of_all, ranges = self._correction(self.latest, quantile), self._ranges()
        known = {bits: self._correction(some, quantile) for bits, some in ranges.items()}
        table = [0.0]
        for size in range(1, self._first.max_batch + 1):
            own, seen = known.get(size.bit_length(), of_all), len(ranges.get(size.bit_length(), ()))
            seconds = (own(size) if seen >= ENOUGH else max(own(size), of_all(size))) + wait
            table.append(max(seconds, table[-1]) if size > 1 else min(seconds, self._slowest))
        return Profile((*table, float("inf")), self._first.parts)

    def _correction(self, seen: Iterable[tuple[int, float]], quantile: float) -> Callable[[int], float]:
        """The seconds of a size, by what batches of sizes near it have taken: as much longer, or by as many seconds.

        What is less is said. If it is too little, a batch of that size shows it; what is too much, none would show.
        """
        stretch = high_quantile([stretch for _, stretch in seen], quantile)
        more = high_quantile([(stretch - 1.0) * self._first.seconds(size) for size, stretch in seen], quantile)
        return lambda size: min(self._first.seconds(size) * stretch, self._first.seconds(size) + more)

    @property
    def tried(self) -> Profile:
        """The profile with a batch of 1 that takes what the first one says, if that is less."""
        alone = min(self.profile.table[1], self._first.table[1])
        return replace(self.profile, table=(0.0, alone, *self.profile.table[2:]))

    def _ranges(self) -> dict[int, list[tuple[int, float]]]:
        """By range of sizes from one power of two to the next, those of `latest`."""
        ranges: dict[int, list[tuple[int, float]]] = {}
        for size, stretch in self.latest:
            ranges.setdefault(size.bit_length(), []).append((size, stretch))
        return ranges

    @property
    def longest_wait(self) -> float:
        """The longest of the latest waits; 0 if there was no batch."""
        return high_quantile(list(self._waits), WAIT_QUANTILE) if self._waits else 0.0

    def variation(self) -> float:
        """By how much batches of about one size vary: the 90th percentile of their seconds over the median.

        That of the range of sizes in which it is largest. 1: they do not vary, or too few were seen.
        """
        ranges = [[stretch for _, stretch in some] for some in self._ranges().values()]
        some = [stretches for stretches in ranges if len(stretches) >= ENOUGH_TO_VARY]
        return max([high_quantile(one, 0.9) / max(high_quantile(one, 0.5), 1e-12) for one in some], default=1.0)

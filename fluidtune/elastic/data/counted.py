"""Finds means whose count is that of the whole data, as ``len(loader.dataset)`` is, where a worker has read a part.

``total / len(loader.dataset)`` is how many loops end, and as ``elastic.mean(total, len(loader.dataset))`` it would be
counted once for each worker. ``running / len(loader)`` is a mean of the batches' means: that of several workers is the
same only if each batch is divided evenly.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counted:
    """What this worker has read since the last mean.

    ``samples``: of all loaders. ``returned``: what `elastic.samples` has returned.
    """

    samples: int = 0
    returned: int = 0
    #: Of the loaders: the samples that there are, and the batches; None: unknown.
    _of_data: set[int | None] = field(default_factory=set)
    _batches: set[int | None] = field(default_factory=set)
    #: A batch was divided into parts of different sizes.
    _uneven: bool = False

    def read(self, samples: int, *, uneven: bool, of_data: int | None, batches: int | None) -> None:
        """A batch, of which this worker has ``samples``; its loader has ``of_data`` samples and ``batches``."""
        self.samples += samples
        self._uneven = self._uneven or uneven
        self._of_data.add(of_data)
        self._batches.add(batches)

    def why_wrong(self, count: float) -> str | None:
        """Why a mean over ``count`` would not be that of the trial alone, as far as it is known."""
        if count == self.returned:
            return None
        if count in self._of_data and self.samples < count:
            return (
                f"elastic.mean() got the number of all samples, {count:g}, as the count of a worker that has read "
                f"{self.samples}: add up elastic.samples(len(x)) instead"
            )
        if count in self._batches and self._uneven and self.samples > count:
            return (
                f"elastic.mean() got a number of batches, {count:g}, and not all parts of a batch had the same size: "
                "add up loss * n for n = elastic.samples(len(x)), and n"
            )
        return None

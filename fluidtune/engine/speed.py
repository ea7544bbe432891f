"""What is known about the speed of trials: seconds per iteration at each width, and how they scale.

Nothing is decided about devices. A `TrialSpeed` belongs to one trial, a `GroupSpeed` to one TrialGroup, and one more to
the whole tuning job. What a trial has found out about a width serves the others of its group. A group that knows
nothing asks the job, so that a new rung does not try again what the rung before it found useless.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

#: Recent results at one width that the median is taken over.
RECENT = 7
#: Trials that are remembered for each figure; the one measured longest ago is forgotten first.
TRIALS_REMEMBERED = 101
#: Results at a width, after the warm-up and over all trials, from which on a group's ratio counts.
ENOUGH = 3
#: Results after the warm-up from which on a trial's own speed at a width is compared with that at others.
TRUSTED = 2
#: A median is news again when it has moved by this part since it was news.
CHANGED = 1 / 3


def overhead(ratio: float, width: float, to: float = 1) -> float:
    """Eq. 3.2 solved for the overhead, at least 1: alpha for a width below 1, beta for a width above ``to``.

    ``ratio`` is h(width) / h(to), and h(w) / h(1) is alpha**(1/w - 1) on a share and beta**(w - 1) / w on w devices.
    """
    if width < 1:
        return max(1.0, ratio ** (1 / (1 / width - 1)))
    return max(1.0, (ratio * width / to) ** (1 / (width - to)))


def scaled(beta: float, width: float) -> float:
    """h(width) / h(1) for a width of 1 or more (eq. 3.2)."""
    try:
        return beta ** (width - 1) / width
    except OverflowError:
        return math.inf


def widest_paying(beta: float) -> float:
    """The largest width at which one more worker still pays with this beta (eq. 3.2); infinity for beta 1.

    beta**(w-1)/w < beta**(w-2)/(w-1)  <=>  w < beta/(beta-1)
    """
    return math.inf if beta <= 1 else max(1, math.ceil(beta / (beta - 1)) - 1)


class TrialSpeed:
    """Seconds per iteration of one trial, by width."""

    def __init__(self) -> None:
        #: Recent results by width, without the warm-up. No list is empty.
        self._samples: dict[float, deque[float]] = {}
        #: The warm-up result by width, which serves until there is a second one. No key is also in _samples.
        self._warm_up: dict[float, float] = {}
        #: By width, the median that was news last.
        self._news: dict[float, float] = {}
        #: What `seconds` and `beta` have answered since the last result; they are asked more often than results come.
        self._medians: dict[float, float | None] = {}
        self._beta: float | None = None
        self._beta_known = True
        #: Width of the last result, None before the first and after every start and resize.
        self._last_width: float | None = None

    def restart(self) -> None:
        """Workers were started or exchanged, so that the next result is a warm-up whatever its width."""
        self._last_width = None

    def record_result(self, width: float, seconds: float) -> bool:
        """Adds a result. Returns whether it is news: among the first ENOUGH at this width, or the median has moved."""
        self._medians.pop(width, None)
        self._beta_known = False
        warm_up = width != self._last_width
        self._last_width = width
        if warm_up:
            if width in self._samples:
                return False
            self._warm_up[width] = seconds
            return True
        self._warm_up.pop(width, None)
        samples = self._samples.setdefault(width, deque(maxlen=RECENT))
        samples.append(seconds)
        found = self._medians[width] = median(samples)
        before = self._news.get(width, found)
        news = len(samples) <= ENOUGH or abs(found - before) > CHANGED * before
        if news:
            self._news[width] = found
        return news

    def seconds(self, width: float) -> float | None:
        """Median seconds per iteration at ``width``: the warm-up's until there are others, None before any."""
        if width not in self._medians:
            samples = self._samples.get(width)
            self._medians[width] = median(samples) if samples else self._warm_up.get(width)
        return self._medians[width]

    def count(self, width: float) -> int:
        """Number of recent results at ``width``, without the warm-up."""
        return len(self._samples.get(width, ()))

    @property
    def measured(self) -> bool:
        """Whether there is any result."""
        return bool(self._samples or self._warm_up)

    def widths(self) -> list[float]:
        """Widths with any result, ascending."""
        return sorted({*self._samples, *self._warm_up})

    def beta(self) -> float | None:
        """Scaling overhead between the narrowest whole width measured and the widest one with TRUSTED results.

        None while these are not two widths.
        """
        if not self._beta_known:
            self._beta_known, self._beta = True, None
            widest = max((w for w, samples in self._samples.items() if len(samples) >= TRUSTED), default=0)
            narrowest = min((w for w in (*self._samples, *self._warm_up) if w >= 1), default=widest)
            before, after = self.seconds(narrowest), self.seconds(widest)
            if narrowest < widest and before and after:
                self._beta = overhead(after / before, widest, narrowest)
        return self._beta

    def base_seconds(self) -> float | None:
        """Seconds per iteration on one worker, measured or by eq. 3.2 from a larger width; None if unknown."""
        measured, beta = self.seconds(1), self.beta()
        if measured is not None or beta is None:
            return measured
        narrowest = min(w for w in self.widths() if w >= 1)
        return (self.seconds(narrowest) or 0.0) / scaled(beta, narrowest)

    def by_width(self) -> dict[float, float]:
        """Seconds per iteration at every measured width."""
        return {width: s for width in self.widths() if (s := self.seconds(width)) is not None}


class _Figures:
    """One figure for each of the trials that were measured last, and the median of these."""

    def __init__(self) -> None:
        #: The latest figure of each trial, least recently updated first; at most TRIALS_REMEMBERED.
        self._by_trial: dict[str, float] = {}
        #: Median of the values of _by_trial; None when it must be computed again.
        self._median: float | None = None

    def put(self, trial: str, value: float) -> None:
        self._by_trial.pop(trial, None)
        self._by_trial[trial] = value
        if len(self._by_trial) > TRIALS_REMEMBERED:
            del self._by_trial[next(iter(self._by_trial))]
        self._median = None

    def median(self) -> float | None:
        if self._median is None and self._by_trial:
            self._median = median(self._by_trial.values())
        return self._median


class GroupSpeed:
    """What the trials of a group have in common: seconds per iteration on one worker, and ratios at other widths."""

    def __init__(self, job: GroupSpeed | None = None) -> None:
        #: The figures of the whole job, asked where the group knows nothing; None if these are the job's.
        self._job = job
        #: Seconds per iteration on one worker, by trial.
        self._base = _Figures()
        #: By width: seconds per iteration divided by those on one worker, by trial. Width 1 is not among them.
        self._ratios: dict[float, _Figures] = {}
        #: By width: results after the warm-up that stand behind _ratios. A width counts from ENOUGH results on.
        self._counts: dict[float, int] = {}
        #: Iterations that trials had done in all when they finished.
        self._totals = _Figures()
        #: The fitted alpha and beta (None: not known); emptied with every new ratio.
        self._overheads: dict[str, float | None] = {}

    def record_result(self, trial: str, speed: TrialSpeed, width: float, gang: int = 1) -> None:
        """Takes over what ``speed`` says after ``trial`` has reported a result at ``width``.

        ``gang``: how many devices the trial needs at once. One that needs several never runs on one device; there it is
        taken to be as many times slower.
        """
        if self._job is not None:
            self._job.record_result(trial, speed, width, gang)
        if gang > 1:
            seconds = speed.seconds(gang)
            if seconds is not None:
                self._base.put(trial, seconds * gang)
            return
        base = speed.base_seconds()
        if width != 1 and speed.count(width):
            self._counts[width] = self._counts.get(width, 0) + 1
        if base is None and width < 1:
            # This trial never ran alone, but others of its group did.
            base = self.base_seconds()
        if base is None:
            return
        if width == 1:
            self._base.put(trial, base)
        for other in speed.widths() if width == 1 else [width]:
            seconds = speed.seconds(other)
            if other != 1 and speed.count(other) and seconds is not None:
                self._ratios.setdefault(other, _Figures()).put(trial, seconds / base)
                self._overheads.clear()

    def record_end(self, trial: str, iterations: float) -> None:
        """``trial`` came to its end after ``iterations`` in all."""
        self._totals.put(trial, iterations)

    def base_seconds(self) -> float | None:
        """Median seconds per iteration on one worker."""
        own = self._base.median()
        return own if own is not None or self._job is None else self._job.base_seconds()

    def total_iterations(self) -> float | None:
        """Median iterations of the group's finished trials. Rungs differ, so that the job is not asked."""
        return self._totals.median()

    def measured_ratio(self, width: float) -> float | None:
        """Seconds per iteration at ``width`` divided by those at 1; None before ENOUGH results stand behind it."""
        figures = self._ratios.get(width)
        if figures is not None and self._counts.get(width, 0) >= ENOUGH:
            return figures.median()
        return self._job.measured_ratio(width) if self._job is not None else None

    def ratio(self, width: float) -> float:
        """The measured ratio if there is one, else that of eq. 3.2 with the fitted alpha and beta."""
        if width == 1:
            return 1.0
        measured = self.measured_ratio(width)
        if measured is not None:
            return measured
        return self.alpha ** (1 / width - 1) if width < 1 else scaled(self.beta, width)

    def knows_scaling(self) -> bool:
        """Whether beta was measured."""
        return self._fitted("beta") is not None

    @property
    def alpha(self) -> float:
        """Packing overhead (eq. 3.2) fitted to the measured ratios; at least 1, and 1 before anything was measured."""
        return self._fitted("alpha") or 1.0

    @property
    def beta(self) -> float:
        """Scaling overhead (eq. 3.2) fitted to the measured ratios; at least 1, and 1 (optimistic) before any."""
        return self._fitted("beta") or 1.0

    def _fitted(self, name: str) -> float | None:
        if name not in self._overheads:
            fits = []
            for width, figures in self._ratios.items():
                ratio = figures.median()
                if ratio is None or self._counts.get(width, 0) < ENOUGH or (width < 1) != (name == "alpha"):
                    continue
                fits.append(overhead(ratio, width))
            self._overheads[name] = median(fits) if fits else None
        own = self._overheads[name]
        return own if own is not None or self._job is None else self._job._fitted(name)

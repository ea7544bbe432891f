"""What is known about how fast trials are: seconds per iteration at each width, and how that scales.

Decides nothing about devices. A `Speed` belongs to one trial, a `Pool` to one TrialGroup; what one trial of a
group has found out about widths serves the others through the pool. A pool that knows nothing asks its
parent (the whole tuning job), so that a new rung does not try again what the rung before it found useless.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

#: How many recent results at one width the median is taken over.
RECENT = 7
#: How many trials a pool remembers for each figure; the one heard of longest ago goes first.
TRIALS_REMEMBERED = 101
#: Results at a width, past the warm-up and over all trials, before the pool's ratio counts: a single bad
#: sample must not keep a whole group from growing.
ENOUGH = 3
#: Results past the warm-up before a trial's own speed at a width is held against others.
TRUSTED = 2
#: A median that moved by this part since it was news is news again.
CHANGED = 1 / 3


def overhead(ratio: float, width: float, to: float = 1) -> float:
    """Eq. 3.2 solved for the overhead, at least 1: alpha for a width below 1, beta for one above ``to``.

    ``ratio`` is h(width)/h(to), and h(w)/h(1) is alpha**(1/w - 1) on a share, beta**(w - 1)/w on several.
    """
    if width < 1:
        return max(1.0, ratio ** (1 / (1 / width - 1)))
    return max(1.0, (ratio * width / to) ** (1 / (width - to)))


def scaled(beta: float, width: float) -> float:
    """h(width)/h(1) for a width of 1 or more (eq. 3.2)."""
    try:
        return beta ** (width - 1) / width
    except OverflowError:
        return math.inf


def widest_paying(beta: float) -> float:
    """The largest width at which, with this beta, one more worker still pays; infinity for beta 1.

    beta**(w-1)/w < beta**(w-2)/(w-1)  <=>  w < beta/(beta-1)
    """
    return math.inf if beta <= 1 else max(1, math.ceil(beta / (beta - 1)) - 1)


class Speed:
    """Seconds per iteration of one trial, by width."""

    def __init__(self) -> None:
        #: Recent results by width, the warm-up left out. No list is empty.
        self._samples: dict[float, deque[float]] = {}
        #: The warm-up result by width: serves until there is a second; no key is also in _samples.
        self._warm_up: dict[float, float] = {}
        #: By width, the figure that was news last.
        self._told: dict[float, float] = {}
        #: What `seconds` answered and `beta` computed since the last result: asked more often than changed.
        self._medians: dict[float, float | None] = {}
        self._beta: float | None = None
        self._beta_known = True
        #: Width of the last result, None before the first and after every start and resize.
        self._last_width: float | None = None

    def restart(self) -> None:
        """The next result is a warm-up, whatever its width: workers were started or exchanged."""
        self._last_width = None

    def record(self, width: float, seconds: float) -> bool:
        """Takes one result. True if it is news: one of the first ENOUGH at this width, or the median has moved."""
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
        told = self._told.get(width, found)
        news = len(samples) <= ENOUGH or abs(found - told) > CHANGED * told
        if news:
            self._told[width] = found
        return news

    def seconds(self, width: float) -> float | None:
        """Median seconds per iteration at ``width``, the warm-up's before there is more, None before that."""
        if width not in self._medians:
            samples = self._samples.get(width)
            self._medians[width] = median(samples) if samples else self._warm_up.get(width)
        return self._medians[width]

    def count(self, width: float) -> int:
        """Recent results at ``width``, the warm-up not counted."""
        return len(self._samples.get(width, ()))

    def widths(self) -> list[float]:
        """Widths with any result, ascending."""
        return sorted({*self._samples, *self._warm_up})

    def beta(self) -> float | None:
        """Scaling overhead between the narrowest whole width measured and the widest with TRUSTED results.

        None as long as these are not two.
        """
        if not self._beta_known:
            self._beta_known, self._beta = True, None
            widest = max((w for w, samples in self._samples.items() if len(samples) >= TRUSTED), default=0)
            narrowest = min((w for w in (*self._samples, *self._warm_up) if w >= 1), default=widest)
            before, after = self.seconds(narrowest), self.seconds(widest)
            if narrowest < widest and before and after:
                self._beta = overhead(after / before, widest, narrowest)
        return self._beta

    def base(self) -> float | None:
        """Seconds per iteration on one worker, measured or by eq. 3.2 from wider; None if unknown."""
        measured, beta = self.seconds(1), self.beta()
        if measured is not None or beta is None:
            return measured
        narrowest = min(w for w in self.widths() if w >= 1)
        return (self.seconds(narrowest) or 0.0) / scaled(beta, narrowest)

    def by_width(self) -> dict[float, float]:
        """Seconds per iteration at every measured width."""
        return {width: s for width in self.widths() if (s := self.seconds(width)) is not None}


class _Figures:
    """One figure for each of the trials heard of last, and their median."""

    def __init__(self) -> None:
        #: The latest figure of each trial, least recently updated first; at most TRIALS_REMEMBERED.
        self._by_trial: dict[str, float] = {}
        #: Median of _by_trial's values, None when it must be computed anew.
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


class Pool:
    """What the trials of a group have in common: seconds on one worker, and other widths' ratios to it."""

    def __init__(self, parent: Pool | None = None) -> None:
        #: Asked when this pool has no answer of its own; None for the pool of the whole job.
        self._parent = parent
        #: Seconds per iteration on one worker, by trial.
        self._base = _Figures()
        #: By width: seconds per iteration over those on one worker, by trial. Never width 1.
        self._ratios: dict[float, _Figures] = {}
        #: By width: how many results past the warm-up stand behind _ratios; a width counts from ENOUGH on.
        self._counts: dict[float, int] = {}
        #: Iterations that finished trials had done in all.
        self._totals = _Figures()
        #: Cached alpha and beta (None: not known), dropped with every new ratio.
        self._overheads: dict[str, float | None] = {}

    def record(self, trial: str, speed: Speed, width: float) -> None:
        """Takes over what ``speed`` says after a result of ``trial`` at ``width``."""
        if self._parent is not None:
            self._parent.record(trial, speed, width)
        base = speed.base()
        if width != 1 and speed.count(width):
            self._counts[width] = self._counts.get(width, 0) + 1
        if base is None and width < 1:
            # A trial that was never alone: its like were.
            base = self.base()
        if base is None:
            return
        if width == 1:
            self._base.put(trial, base)
        for other in speed.widths() if width == 1 else [width]:
            seconds = speed.seconds(other)
            if other != 1 and speed.count(other) and seconds is not None:
                self._ratios.setdefault(other, _Figures()).put(trial, seconds / base)
                self._overheads.clear()

    def finished(self, trial: str, iterations: float) -> None:
        """``trial`` came to its end after ``iterations``, all told."""
        self._totals.put(trial, iterations)

    def base(self) -> float | None:
        """Median seconds per iteration on one worker."""
        own = self._base.median()
        return own if own is not None or self._parent is None else self._parent.base()

    def total(self) -> float | None:
        """Median iterations of the group's finished trials; rungs differ, so the parent is not asked."""
        return self._totals.median()

    def measured_ratio(self, width: float) -> float | None:
        """Seconds per iteration at ``width`` over those at 1, once ENOUGH results stand behind it."""
        figures = self._ratios.get(width)
        if figures is not None and self._counts.get(width, 0) >= ENOUGH:
            return figures.median()
        return self._parent.measured_ratio(width) if self._parent is not None else None

    def ratio(self, width: float) -> float:
        """The measured ratio if there is one, else eq. 3.2 with the fitted alpha and beta."""
        if width == 1:
            return 1.0
        measured = self.measured_ratio(width)
        if measured is not None:
            return measured
        return self.alpha ** (1 / width - 1) if width < 1 else scaled(self.beta, width)

    def knows_scaling(self) -> bool:
        """Was beta measured?"""
        return self._fitted("beta") is not None

    def by_width(self) -> dict[float, float]:
        """Seconds per iteration by width: the median at 1, times the measured ratio elsewhere; ascending."""
        base = self.base()
        if base is None:
            return {}
        ratios = {width: self.measured_ratio(width) for width in self._ratios}
        seconds = {width: base * ratio for width, ratio in ratios.items() if ratio is not None}
        return dict(sorted({1: base, **seconds}.items()))

    @property
    def alpha(self) -> float:
        """Packing overhead fitted to the measured ratios, at least 1, and 1 before anything was measured."""
        return self._fitted("alpha") or 1.0

    @property
    def beta(self) -> float:
        """Scaling overhead fitted to the measured ratios, at least 1, and 1 (optimistic) before any."""
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
        return own if own is not None or self._parent is None else self._parent._fitted(name)

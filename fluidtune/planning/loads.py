"""What is known about a trial: how long it runs at a width (eq. 3.2), and how many trials pay on a device (eq. 3.1).

This module says what a width, a load and a limit may be. Which trial gets which width or device is not decided here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

#: A share (<= 1) of one device, or a whole number of devices.
Width = Fraction | int | float
#: The largest denominator of a share that is given as a float: far more trials than fit any device.
_MOST_SHARES = 10_000

#: What one more trial on a device must add (O of eq. 3.1) to be worth it. The dissertation has a threshold and gives no
#: number. Below 5 % the noise of measured times decides.
PACKING_THRESHOLD = 0.05


@dataclass(frozen=True)
class TrialLoad:
    """What one trial of a TrialGroup still has to do.

    ``height``: seconds left on one whole device (h_i,1), finite and >= 0; 0 means that nothing is left.
    ``alpha``: packing overhead, >= 1; the run time grows by this factor for each neighbour on the device.
    ``beta``: scaling overhead, >= 1; the run time, once divided by the workers, grows by this factor for each worker
    beyond the first.
    The paper keeps alpha below c/(c-1) and beta below 1 + 1/d, where packing and scaling always pay. Larger overheads
    are allowed here. Raises ValueError for anything else.
    """

    trial_id: str
    height: float
    alpha: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.height) and self.height >= 0):
            raise ValueError(
                f"trial {self.trial_id!r}: height is {self.height!r}, expected seconds >= 0 and finite; "
                "for an unknown budget pass an estimate"
            )
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not (math.isfinite(value) and value >= 1):
                raise ValueError(
                    f"trial {self.trial_id!r}: {name} is {value!r}, expected a finite factor >= 1; "
                    "pass 1.0 where a measurement says that there is no overhead"
                )


def as_width(width: Width) -> Fraction | int:
    """The width as an exact number: an int from 1 up, a Fraction below 1 (0.333... becomes 1/3).

    Raises ValueError for anything but a share in (0, 1] or a whole number of devices.
    """
    if type(width) is Fraction and 0 < width.numerator < width.denominator:
        return width
    if isinstance(width, (int, float, Fraction)) and math.isfinite(width) and width > 0:
        if width == int(width):
            return int(width)
        if width < 1:
            # A share is 1/p. As a float it is not exact, but p of them must add up to 1.
            exact = Fraction(width).limit_denominator(_MOST_SHARES)
            if exact > 0:
                return exact
    raise ValueError(f"width is {width!r}, expected a share of one device in (0, 1] or a whole number of devices")


def check_limits(n: int, c: int = 1, d: int = 1) -> tuple[int, int, int]:
    """``(n, c, d)``, devices, packing and scaling limit, as ints; ValueError unless whole numbers >= 1."""
    checked = []
    for name, what, value in (("n", "devices", n), ("c", "packing limit", c), ("d", "scaling limit", d)):
        try:
            number = operator.index(value)
        except TypeError:
            number = 0
        if number < 1 or isinstance(value, bool):
            raise ValueError(f"{name} ({what}) is {value!r}, expected a whole number >= 1")
        checked.append(number)
    return checked[0], checked[1], checked[2]


def check_unique(loads: Iterable[TrialLoad]) -> list[TrialLoad]:
    """The loads as a list. Raises ValueError where two have the same trial_id."""
    listed = list(loads)
    seen: set[str] = set()
    for load in listed:
        if load.trial_id in seen:
            raise ValueError(f"trial {load.trial_id!r} is given twice; pass one TrialLoad per trial")
        seen.add(load.trial_id)
    return listed


def runtime(load: TrialLoad, width: Width) -> float:
    """Seconds that the whole of ``load`` takes at ``width`` (eq. 3.2).

    ``h1 * alpha**(1/w - 1)`` on a share w < 1 of a device, ``h1 / w * beta**(w - 1)`` on w whole devices;
    the result is infinite where the overhead is beyond what a float holds. Raises ValueError for an impossible width.
    """
    exact = as_width(width)
    if load.height == 0:
        return 0.0
    try:
        if isinstance(exact, Fraction):
            return load.height * load.alpha ** (exact.denominator / exact.numerator - 1)
        return load.height / exact * load.beta ** (exact - 1.0)
    except OverflowError:
        return math.inf


def lower_bound(loads: Iterable[TrialLoad], n: int, *, c: int, d: int) -> float:
    """Seconds below which no schedule can be: ``max(max_i min_w h_i(w), sum_i min_w w * h_i(w) / n)``.

    w ranges over the allowed widths: 1/p for p = 1 to c and the whole numbers 1 to min(d, n). The two parts
    may want different widths of one trial, so the best schedule can be far above this: 4 equal trials on 4
    devices with c = d = 4 and no overheads cannot be done before h, and the bound is h / 4.
    The bound is 0 when nothing is left to run. No schedule is built. Raises ValueError for a limit below 1 or a trial
    given twice.
    """
    n, c, d = check_limits(n, c, d)
    widths: list[Width] = [Fraction(1, p) for p in range(c, 1, -1)] + list(range(1, min(d, n) + 1))
    longest, areas = 0.0, []
    for load in check_unique(loads):
        times = [runtime(load, width) for width in widths]
        longest = max(longest, min(times))
        areas.append(min(time * float(width) for time, width in zip(times, widths, strict=True)))
    return max(longest, math.fsum(areas) / n)


def marginal_benefit(p: int, seconds: float, seconds_before: float) -> float:
    """What the p-th trial on one device adds, p > 1: ``O(p) = 1 - (p-1)/p * T_p / T_{p-1}`` (eq. 3.1).

    ``seconds``: mean time per iteration, T_p, when p trials share the device; ``seconds_before``: T_{p-1}, of one trial
    fewer, in the same unit. The answer is 1/p when packing is free, and 0 or less when it is useless.
    """
    return 1 - (p - 1) / p * seconds / seconds_before


def packing_limit(times: Mapping[int, float | Sequence[float]], threshold: float) -> int:
    """The largest number of trials that one device should hold (eq. 3.1).

    ``times[p]``: seconds per iteration when p trials are packed on one device, either their mean or one number per
    trial. The answer is the largest p such that O (`marginal_benefit`) of the means stays above ``threshold`` for 2 to
    p; the search ends at the first p that was not measured. Raises ValueError when p = 1 is missing, a key is not a
    whole number >= 1, a time is not finite and > 0, or the threshold is not finite.
    """
    if not math.isfinite(threshold):
        raise ValueError(f"threshold is {threshold!r}, expected a finite number, for example 0.05")
    means: dict[int, float] = {}
    for p, given in times.items():
        if isinstance(p, bool) or not isinstance(p, int) or p < 1:
            raise ValueError(f"times has the key {p!r}, expected a number of packed trials, 1 or more")
        values = [float(given)] if isinstance(given, (int, float)) else [float(value) for value in given]
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(
                f"times[{p}] is {given!r}, expected seconds per iteration, finite and > 0; "
                "leave out what was not measured"
            )
        means[p] = math.fsum(values) / len(values)
    if 1 not in means:
        raise ValueError(f"times has {sorted(means)!r} but not 1; measure one trial alone first")
    limit = 1
    while limit + 1 in means and marginal_benefit(limit + 1, means[limit + 1], means[limit]) > threshold:
        limit += 1
    return limit

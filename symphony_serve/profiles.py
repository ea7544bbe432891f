"""How long a batch of a model takes on a GPU, by its number of requests. All times are seconds.

A `Profile` is a table with one entry for each batch size from 1 to the largest. Symphony's linear profile,
``l(b) = alpha*b + beta``, is such a table (`Profile.linear`), and so are the expected times of a model whose run time
depends on its input. How a measured time becomes a profile is not decided here.

Profiles are kept as JSON text, so that a model need not be measured at each start: ``{"format": 1, "device": TEXT,
"seconds": {MODEL: [l(1), l(2), ...]}, "delays": {MODEL: SECONDS}, "parts": {MODEL: [...]}}``. A profile holds on the
device on which it was measured. The delays are those besides the device's time that were measured with it; a text may
have none. It has the parts of models in stages only.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from symphony_serve.errors import ServeError

logger = logging.getLogger(__name__)

#: Of the JSON text. It grows when the meaning of the text changes.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """The latency of a model by batch size.

    table: ``table[b]`` is the seconds of a batch of b requests. It has one entry more at each end: ``table[0]`` is 0,
        and the last one, a size that is never formed, is infinite. It never falls: so a larger batch never ends
        sooner, which the rules in `batching` rely on.
    parts: ``parts[b - 1]`` is the part of l(b) after which the device can start the next batch: in a pipeline of stages
        the seconds of the largest stage over those of all. None: 1 for each size.

    Make one with `linear` or `from_seconds`, and of one in stages with `in_stages`.
    """

    table: tuple[float, ...]
    parts: tuple[float, ...] | None = None

    @classmethod
    def linear(cls, alpha: float, beta: float, max_batch: int) -> Profile:
        """``l(b) = alpha*b + beta`` for batches of 1 to ``max_batch``.

        ``alpha``: seconds for each request, ``beta``: seconds for each batch. Raises ServeError if one of them is
        negative or not finite, if both are 0, or if ``max_batch`` is below 1.
        """
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not (0 <= value < math.inf):
                raise ServeError(f"{name} is {value}, expected seconds of 0 or more; measure the profile again")
        return cls.from_seconds(alpha * size + beta for size in range(1, max_batch + 1))

    @classmethod
    def from_seconds(cls, seconds: Iterable[float]) -> Profile:
        """The profile of the measured seconds of batches of 1, 2, 3 and so on.

        An entry that is smaller than one before it is raised to that one, with a warning. Raises ServeError if there
        is no entry, or one that is not positive and finite.
        """
        given = [float(value) for value in seconds]
        if not given:
            raise ServeError("a profile has no entry, expected the seconds of a batch of 1 at least")
        table = [0.0]
        for size, value in enumerate(given, start=1):
            if not 0 < value < math.inf:
                raise ServeError(f"a batch of {size} takes {value} s by its profile, expected a positive number")
            table.append(max(value, table[-1]))
        lowered = sum(value != raised for value, raised in zip(given, table[1:], strict=True))
        if lowered:
            said = "A profile falls at %d of its %d sizes; each was raised to the one before"
            logger.warning(said, lowered, len(given))
        return cls((*table, math.inf))

    def in_stages(self, parts: Sequence[float]) -> Profile:
        """The same latencies on a device that starts a batch of b when ``parts[b - 1]`` of the one before is over.

        Raises ServeError if there is not one part for each size, above 0 and at most 1.
        """
        if len(parts) != self.max_batch or not all(0 < part <= 1 for part in parts):
            said = f"the parts of {self.max_batch} batch sizes are {list(parts)}"
            raise ServeError(f"{said}, expected as many numbers above 0 and at most 1; measure the profile again")
        return replace(self, parts=tuple(map(float, parts)))

    def part(self, size: int) -> float:
        """The part of the seconds of a batch after which its device can start the next one."""
        return 1.0 if self.parts is None or not 1 <= size <= self.max_batch else self.parts[size - 1]

    def overlap(self, size: int) -> float:
        """The last seconds of a batch, in which its device can run the next one; 0 on a device without stages."""
        return 0.0 if self.parts is None else self.table[size] * (1 - self.parts[size - 1])

    @property
    def depth(self) -> int:
        """How many batches a device can have begun and not ended."""
        return 1 if self.parts is None else math.ceil(1 / min(self.parts))

    @property
    def max_batch(self) -> int:
        return len(self.table) - 2

    def seconds(self, size: int) -> float:
        """l(b) in seconds; infinite above `max_batch`."""
        return self.table[size] if size <= self.max_batch else math.inf

    def largest(self, seconds: float) -> int:
        """The largest b with l(b) <= ``seconds``; 0 if a batch of 1 takes longer."""
        return bisect_right(self.table, seconds, 0, len(self.table) - 1) - 1 if seconds >= 0 else 0


def check_slo(model: str, profile: Profile, slo: float, delay: float = 0.0) -> None:
    """Raise ServeError if a batch of 1 cannot be answered within ``slo`` seconds, or if these are not finite.

    ``delay``: seconds of the network on the way to the GPU and back.
    """
    if not slo < math.inf:
        raise ServeError(f"model {model} has an SLO of {slo} s, expected finite seconds")
    needed = profile.table[1] + delay
    if needed > slo:
        raise ServeError(
            f"model {model} has an SLO of {slo} s, but a batch of 1 takes {profile.table[1]:.4g} s "
            f"and the network {delay:.4g} s; give an SLO of at least {math.ceil(1e4 * needed) / 1e4} s"
        )


def profiles_to_json(profiles: Mapping[str, Profile], device: str, delays: Mapping[str, float] | None = None) -> str:
    """The text. device: where they were measured, in words. delays: seconds by model."""
    kept: dict[str, Any] = {"format": FORMAT, "device": device}
    kept["seconds"] = {name: profile.table[1:-1] for name, profile in profiles.items()}
    kept["delays"] = dict(delays or {})
    kept["parts"] = {name: profile.parts for name, profile in profiles.items() if profile.parts is not None}
    return json.dumps({name: value for name, value in kept.items() if value or name != "parts"}, indent=1)


def profiles_from_json(text: str) -> tuple[dict[str, Profile], dict[str, float]]:
    """The profiles by model, and the seconds of delay of the models that have one.

    Raises ServeError if the text is not of this format.
    """
    try:
        kept: Any = json.loads(text)
    except ValueError as error:
        raise ServeError(f"the kept profiles are not JSON ({error}); measure them again") from None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or not isinstance(kept.get("seconds"), dict):
        found = kept.get("format") if isinstance(kept, dict) else type(kept).__name__
        raise ServeError(f"the kept profiles have format {found}, expected {FORMAT}; measure them again")
    delays = kept.get("delays") or {}
    longest = sys.float_info.max
    if not isinstance(delays, dict) or not all(
        isinstance(one, int | float) and 0 <= one <= longest for one in delays.values()
    ):
        raise ServeError(f"the kept delays are {delays!r}, expected seconds by model; measure them again")
    if not kept["seconds"]:
        raise ServeError("the kept profiles are of no model; measure them again")
    try:
        profiles = {name: Profile.from_seconds(seconds) for name, seconds in kept["seconds"].items()}
        for name, parts in (kept.get("parts") or {}).items():
            profiles[name] = profiles[name].in_stages(parts)
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError) as error:
        raise ServeError(f"the kept profiles have an entry that is no list of seconds ({error})") from None
    return profiles, {name: float(one) for name, one in delays.items()}

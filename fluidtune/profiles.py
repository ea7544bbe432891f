"""Profiles: how long an iteration of one kind of trial takes, by width, nodes, and trials on its device.

Emulated devices (`fluidtune.cluster.emulated`) and the twin (`fluidtune.twin`) take their times from a profile. It is
given as a file, or `fluidtune.report.measured` reads it off the event log of a run. What the engine knows of the speed
of running trials is in `fluidtune.engine.speed`. Pure.

A file is one JSON object:

    {"name": "resnet18", "seconds": {"1": 0.7, "2": 0.41, "11": 0.5, "4": 0.2},
     "packed": {"2": 0.9, "3": 1.4}, "memory": 0.3, "source": "where the figures are from"}

``seconds``: seconds per iteration by placement. A placement is the number of devices on each node, as digits: "2" is
two devices of one node, "11" one device on each of two. ``packed``: seconds per iteration of each of p trials that
share one device, by p.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fluidtune.errors import FluidTuneError

#: Devices of one node of emulated devices and of the twin, as of common machines.
DEVICES_PER_NODE = 8


class ProfileError(FluidTuneError):
    """A profile that says too little or something impossible. The message names the value."""


@dataclass(frozen=True)
class Profile:
    """How long the iterations of one kind of trial take.

    Args:
        name: what kind of trial it is, in a word.
        seconds: seconds per iteration by placement; "1" must be there.
        packed: seconds per iteration of each of p >= 2 trials on one device. If p is missing, the trials beyond the
            nearest p below are taken to take turns with the others.
        memory: the part of a device's memory that one trial needs, 0 (none) to 1.
        source: where the times are from.

    Raises:
        ProfileError: "1" is missing, a time is not finite and above 0, a placement does not consist of digits 1 to 9, a
            number of trials is below 2, or memory is not within [0, 1].
    """

    name: str
    seconds: Mapping[str, float]
    packed: Mapping[int, float] = field(default_factory=dict)
    memory: float = 0.0
    source: str = "given"

    def __post_init__(self) -> None:
        if "1" not in self.seconds:
            raise ProfileError(
                f"profile {self.name!r} has seconds for {sorted(self.seconds)} but not for '1', "
                "one trial on one whole device; measure that first"
            )
        for placement, value in self.seconds.items():
            if not (isinstance(placement, str) and placement.isdigit() and "0" not in placement):
                raise ProfileError(
                    f"profile {self.name!r}: {placement!r} is not a placement; write the devices on each node as "
                    'digits: "2" is two devices of one node, "11" one on each of two nodes'
                )
            self._check(f"seconds[{placement!r}]", value)
        for count, value in self.packed.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 2:
                raise ProfileError(f"profile {self.name!r}: packed has the key {count!r}, expected 2 or more trials")
            self._check(f"packed[{count}]", value)
        if not (_number(self.memory) and 0 <= self.memory <= 1):
            raise ProfileError(f"profile {self.name!r}: memory is {self.memory!r}, expected 0 to 1 of a device's")

    def _check(self, what: str, value: Any) -> None:
        if not (_number(value) and value > 0):
            raise ProfileError(f"profile {self.name!r}: {what} is {value!r}, expected seconds, finite and > 0")

    # Times

    def iteration(self, nodes: Sequence[int] = (1,), trials: int = 1) -> float:
        """Seconds of one iteration.

        ``nodes``: how many devices the trial has on each node, in any order. ``trials``: how many trials train on its
        device, itself included. A placement that is not in the profile is estimated from the nearest ones: between
        the next smaller and the next larger width, and beyond the widest as at the widest.
        """
        alone = self._alone(tuple(sorted(nodes)))
        return alone * self._crowding(trials)

    def fastest(self, width: int) -> float:
        """Seconds of one iteration on ``width`` devices, a trial alone, on the placement that is best for it."""
        nodes = range(1, 2 + max(len(known) for known in self._known))
        return min(self._read_off(width, spread) for spread in nodes)

    def _alone(self, nodes: tuple[int, ...]) -> float:
        cached = self._known.get(nodes)
        if cached is None:
            cached = self._known[nodes] = self._read_off(sum(nodes), len(nodes))
        return cached

    def _read_off(self, width: int, spread: int) -> float:
        below = max((w for w in self._by_width if w <= width), default=1)
        above = min((w for w in self._by_width if w >= width), default=below)
        low, high = self._nearest(below, spread), self._nearest(above, spread)
        if above == below:
            return low
        part = (math.log(width) - math.log(below)) / (math.log(above) - math.log(below))
        return math.exp((1 - part) * math.log(low) + part * math.log(high))

    def _nearest(self, width: int, spread: int) -> float:
        """Seconds at a width of the profile, on the placement with the nearest number of nodes; fewer at a tie."""
        return min(self._by_width[width], key=lambda found: (abs(found[0] - spread), found[0]))[1]

    @cached_property
    def _by_width(self) -> dict[int, list[tuple[int, float]]]:
        """By width, (number of nodes, seconds) of each of its placements."""
        found: dict[int, list[tuple[int, float]]] = {}
        for placement, seconds in self.seconds.items():
            found.setdefault(sum(map(int, placement)), []).append((len(placement), seconds))
        return found

    @cached_property
    def _known(self) -> dict[tuple[int, ...], float]:
        return {tuple(sorted(map(int, placement))): seconds for placement, seconds in self.seconds.items()}

    def _crowding(self, trials: int) -> float:
        """Seconds per iteration with ``trials`` on the device divided by those alone."""
        if trials <= 1:
            return 1.0
        nearest = max((p for p in self.packed if p <= trials), default=1)
        at = self.packed[nearest] / self.seconds["1"] if nearest > 1 else 1.0
        return at * trials / nearest

    # What follows from the times

    @property
    def widest(self) -> int:
        """The largest width that it has times for; no trial gets more devices."""
        return max(self._by_width)

    def fits(self, trials: int) -> bool:
        """Whether the memory of a device holds ``trials`` of these trials."""
        return trials * self.memory <= 1 + 1e-9

    # Files

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile's file. Raises ProfileError if it cannot be read or is not a profile."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise ProfileError(f"profile {str(path)!r} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ProfileError(f"profile {str(path)!r} is not JSON: {error}") from None
        allowed = cls.__dataclass_fields__
        if not isinstance(data, dict) or not isinstance(data.get("seconds"), dict):
            raise ProfileError(f"profile {str(path)!r} is not an object with 'seconds' by placement")
        unknown = sorted(set(data) - set(allowed))
        if unknown:
            raise ProfileError(f"profile {str(path)!r} has unknown keys {unknown}; allowed: {', '.join(allowed)}")
        packed = data.get("packed", {})
        if not isinstance(packed, dict) or not all(str(key).isdigit() for key in packed):
            raise ProfileError(f"profile {str(path)!r}: packed is not seconds by number of trials")
        data["packed"] = {int(key): value for key, value in packed.items()}
        data.setdefault("name", Path(path).stem)
        return cls(**data)

    def save(self, path: str | Path) -> None:
        """Writes the file that `load` reads."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["packed"] = {str(count): seconds for count, seconds in self.packed.items()}
        Path(path).write_text(json.dumps({**data, "seconds": dict(self.seconds)}, indent=2) + "\n")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


#: A made-up task. One trial fills half a GPU: two on one GPU are 5 % slower, three and more take turns.
DEFAULT = Profile(
    name="half-a-gpu",
    seconds={"1": 1.0, "2": 0.55, "4": 0.32, "8": 0.22, "11": 0.6, "22": 0.36, "44": 0.25, "88": 0.2},
    packed={2: 1.05, 3: 1.6, 4: 2.15},
    memory=0.2,
    source="made up: no recording",
)

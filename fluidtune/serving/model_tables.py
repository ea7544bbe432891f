"""A TOML file of models as its tables, and what is read from each: each mistake is said in one line.

All times are seconds, all rates requests per second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from fluidtune.errors import FluidTuneError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


#: A number is 0, or between these. Judgement: a picosecond, and a device that computes 10**24 times a second: what a
#: load or a device has is between them, and products of a few such numbers are finite.
LEAST, MOST = 1e-12, 1e24
#: The least rate of requests. Judgement: one in twelve days; 30,000 of them take so many seconds that a float still
#: tells microseconds apart.
LEAST_RATE = 1e-6
#: The largest CV of the gaps. Judgement: at it, all but a few of the requests that are drawn come at once. (Those of
#: AlpaServe's figures end at 8.) At a thousand times more none may come, however many gaps are drawn.
MOST_CV = 100.0
#: The keys of a model, and those of its `layers`.
KEYS = (
    "name", "run", "trial", "checkpoint", "load", "seconds", "bytes", "layers", "hop", "delay", "slo", "rate", "cv",
    "trace", "weight",
)  # fmt: skip
LAYERS = ("seconds", "bytes")
#: Key -> the keys of which one must be there for it to mean anything.
BELONGS_TO = {"trial": ("run",), "bytes": ("run", "seconds", "checkpoint"), "hop": ("layers",), "cv": ("rate",)}

Models = str | Path | Sequence[Mapping[str, Any]]


class ModelTable:
    """What is said of one model. Raises FluidTuneError for keys that there are not, or that mean nothing.

    where: names it in messages. directory: to which paths in it are relative.
    """

    def __init__(self, name: str, table: Mapping[str, Any], where: str, directory: Path):
        self.name, self.table, self.where, self.directory = name, table, where, directory
        _check_known(table, KEYS, where)
        for key, others in BELONGS_TO.items():
            if key in table and not any(one in table for one in others):
                raise FluidTuneError(f"{where} has `{key}` without `{'` or `'.join(others)}`")

    def __contains__(self, key: str) -> bool:
        return key in self.table

    def number(
        self,
        key: str,
        default: float | None = None,
        least: float | None = None,
        low: float = LEAST,
        most: float = MOST,
    ) -> float:
        """A number from ``low`` to ``most``; also 0, if that is ``least``."""
        if key in self.table:
            return checked(self.table[key], key, self.where, least, low, most)
        if default is None:
            raise FluidTuneError(f"{self.where} has no `{key}`")
        return default

    @property
    def layers(self) -> Mapping[str, Any]:
        found = self.table["layers"]
        if not isinstance(found, dict):
            raise FluidTuneError(f"{self.where} has `layers` {found!r}, expected a table")
        _check_known(found, LAYERS, f"{self.where}: layers")
        return found

    def path(self, key: str) -> Path:
        return self.directory / str(self.table[key])

    def rate(self) -> tuple[float, float]:
        """The mean rate in requests per second, and the CV of the gaps, as given or of the trace."""
        if ("rate" in self) == ("trace" in self):
            said = "both `rate` and `trace`" if "rate" in self else "neither `rate` nor `trace`"
            raise FluidTuneError(f"{self.where} has {said}; give one of them")
        if "rate" in self:
            cv = self.number("cv", 1.0, least=0.0, most=MOST_CV)
            return self.number("rate", low=LEAST_RATE), cv
        gaps = np.diff(self._trace(), prepend=0.0)
        return 1 / float(gaps.mean()), min(float(gaps.std() / gaps.mean()), MOST_CV)

    def _trace(self) -> np.ndarray:
        """Arrival times in seconds, one a line."""
        where = f"{self.where}: the trace {str(self.path('trace'))!r}"
        try:
            times = np.array([float(one) for one in self.path("trace").read_text().split()])
        except OSError as error:
            raise FluidTuneError(f"{where} cannot be read: {error.strerror}")
        except ValueError as error:
            raise FluidTuneError(f"{where} has a line that is no number of seconds: {error}")
        if not len(times) or not np.isfinite(times).all() or times[0] < 0 or (np.diff(times) < 0).any():
            raise FluidTuneError(f"{where} is no list of ascending seconds from 0 on, one a line")
        if not times[-1]:
            raise FluidTuneError(f"{where} has no request after 0 s, so it has no rate; give a longer one")
        return times


def model_tables(given: Models) -> list[ModelTable]:
    """The tables of a TOML file's [[models]], or those that are given.

    Raises FluidTuneError if there are none, if a model has no name, or two have the same.
    """
    tables: Any = given
    path = Path(given if isinstance(given, str | Path) else "models")
    if isinstance(given, str | Path):
        try:
            read = tomllib.loads(path.read_text())
        except OSError as error:
            raise FluidTuneError(f"the file of models {str(path)!r} cannot be read: {error.strerror}; give a TOML file")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FluidTuneError(f"{path} is no TOML: {error}")
        _check_known(read, ("models",), str(path))
        tables = read.get("models")
    if not isinstance(tables, Sequence) or not tables or not all(isinstance(one, Mapping) for one in tables):
        raise FluidTuneError(f"{path} has no models; write a [[models]] table for each")
    found: dict[str, ModelTable] = {}
    for number, table in enumerate(tables, 1):
        name = table.get("name")
        if not isinstance(name, str) or not name:
            raise FluidTuneError(f"{path}: model {number} has the name {name!r}, expected text")
        if name in found:
            raise FluidTuneError(f"{path} has two models named {name!r}; give them different names")
        found[name] = ModelTable(name, table, f"{path}: model {name}", path.parent)
    return list(found.values())


def numbers_of(table: Mapping[str, Any], key: str, where: str, least: float | None = None) -> list[float]:
    given = table.get(key)
    if not isinstance(given, list) or not given:
        raise FluidTuneError(f"{where} has `{key}` {given!r}, expected a list of numbers")
    return [checked(one, key, where, least) for one in given]


def _check_known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            near = get_close_matches(str(key), keys, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(keys)}"
            raise FluidTuneError(f"{where} has the unknown key {key!r}; {hint}")


def checked(value: Any, key: str, where: str, least: float | None, low: float = LEAST, most: float = MOST) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # (A whole number may be larger than any float.)
    if not number or not (low <= value <= most or value == least):
        wanted = "above 0" if least is None else f"of {least:g} or more"
        raise FluidTuneError(f"{where} has `{key}` {value!r}, expected a number {wanted} ({low:g} to {most:g})")
    return float(value)

"""A TOML file of models as its tables, and what is read from them: each mistake is said in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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


class NamedTables:
    """The tables of a TOML file's [[models]], or those that are given, by the models' names.

    Raises FluidTuneError if there are none, if a model has no name, or two have the same.
    """

    def __init__(self, given: str | Path | Sequence[Mapping[str, Any]]):
        self.path = Path(given) if isinstance(given, str | Path) else Path("models")
        #: To which paths in the tables are relative.
        self.directory = self.path.parent
        self.tables = _tables_of(given)
        self._names = _names_of(self.tables, str(self.path))

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Each model's name and table."""
        return zip(self._names, self.tables, strict=True)

    def where(self, name: str) -> str:
        """The model, for a message."""
        return f"{self.path}: model {name}"


def _tables_of(given: str | Path | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not isinstance(given, str | Path):
        return _tables(given, "models")
    try:
        read = tomllib.loads(Path(given).read_text())
    except OSError as error:
        raise FluidTuneError(f"the file of models {str(given)!r} cannot be read: {error.strerror}; give a TOML file")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FluidTuneError(f"{given} is no TOML: {error}")
    known(read, ("models",), str(given))
    return _tables(read.get("models"), str(given))


def _tables(found: Any, where: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(found, Sequence) or not found or not all(isinstance(one, Mapping) for one in found):
        raise FluidTuneError(f"{where} has no models; write a [[models]] table for each")
    return found


def _names_of(tables: Sequence[Mapping[str, Any]], path: str) -> list[str]:
    names = [table.get("name") for table in tables]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise FluidTuneError(f"{path}: model {number + 1} has the name {name!r}, expected text")
        if name in names[:number]:
            raise FluidTuneError(f"{path} has two models named {name!r}; give them different names")
    return [str(name) for name in names]


def known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            near = get_close_matches(str(key), keys, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(keys)}"
            raise FluidTuneError(f"{where} has the unknown key {key!r}; {hint}")


def table_of(table: Mapping[str, Any], key: str, keys: tuple[str, ...] | None, where: str) -> dict[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise FluidTuneError(f"{where} has `{key}` {found!r}, expected a table")
    if keys is not None:
        known(found, keys, f"{where}: {key}")
    return found


def number_of(
    table: Mapping[str, Any],
    key: str,
    where: str,
    default: float | None = None,
    least: float | None = None,
    low: float = LEAST,
    most: float = MOST,
) -> float:
    """A number from ``low`` to ``most``; also 0, if that is ``least``."""
    if key not in table and default is not None:
        return default
    if key not in table:
        raise FluidTuneError(f"{where} has no `{key}`")
    return checked(table[key], key, where, least, low, most)


def numbers_of(table: Mapping[str, Any], key: str, where: str, least: float | None = None) -> list[float]:
    given = table.get(key)
    if not isinstance(given, list) or not given:
        raise FluidTuneError(f"{where} has `{key}` {given!r}, expected a list of numbers")
    return [checked(one, key, where, least) for one in given]


def checked(value: Any, key: str, where: str, least: float | None, low: float = LEAST, most: float = MOST) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # (A whole number may be larger than any float.)
    if not number or not (low <= value <= most or value == least):
        wanted = "above 0" if least is None else f"of {least:g} or more"
        raise FluidTuneError(f"{where} has `{key}` {value!r}, expected a number {wanted} ({low:g} to {most:g})")
    return float(value)

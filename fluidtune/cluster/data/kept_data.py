"""Who loads a data set of a job, who waits for it, and who gets its file. `data_keeper` carries the answers.

A data set has two states, besides not being known:

    (unknown) --asked--> loading --loaded--> kept
    loading --lost--> loading, by the process that has waited longest; (unknown), if none waits

"Who" is a connection. A connection asks for one data set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Who = TypeVar("Who")


@dataclass
class _DataSet(Generic[Who]):
    """One data set. ``loader``: who loads it; None: it is kept. ``waiting``: who else has asked, in turn."""

    loader: Who | None
    file: int | None = None
    waiting: list[Who] = field(default_factory=list)


class KeptData(Generic[Who]):
    """See the module."""

    def __init__(self) -> None:
        self._sets: dict[str, _DataSet[Who]] = {}

    def asked(self, key: str, who: Who) -> tuple[bool, int | None]:
        """``who`` asks for the data set. Returns whether it has to load it, and the file if it is kept.

        Neither: it waits for `loaded` or `lost`.
        """
        found = self._sets.get(key)
        if found is None:
            self._sets[key] = _DataSet(who)
            return True, None
        if found.file is None:
            found.waiting.append(who)
        return False, found.file

    def loaded(self, who: Who, file: int) -> list[Who]:
        """``who`` has loaded its data set. Returns who gets the file now.

        Raises:
            KeyError: it was not to load one.
        """
        found = next((each for each in self._sets.values() if each.loader is who), None)
        if found is None:
            raise KeyError("no data set is loaded by this connection")
        waiting = found.waiting
        found.loader, found.file, found.waiting = None, file, []
        return waiting

    def lost(self, who: Who) -> Who | None:
        """``who`` is gone. Returns who has to load its data set now, if it was loading one for which others wait."""
        for key, found in list(self._sets.items()):
            if who in found.waiting:
                found.waiting.remove(who)
            elif found.loader is who:
                if found.waiting:
                    found.loader = found.waiting.pop(0)
                    return found.loader
                del self._sets[key]
        return None

    def files(self) -> list[int]:
        """The files that are kept."""
        return [found.file for found in self._sets.values() if found.file is not None]

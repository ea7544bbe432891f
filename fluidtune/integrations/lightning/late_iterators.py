"""Iterators over the training data that begin after the boundary of an epoch, and end before the next one.

Lightning makes the first ones before the boundary at which a worker joins, and keeps those of an epoch until it makes
the next ones. To the elastic session a loop that does so may go on with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, ref

from torch.utils.data import DataLoader


class LateIterators:
    """Those over all DataLoaders that a Trainer trains on."""

    def __init__(self) -> None:
        self._waiting: list[ref[_LateIterator]] = []
        self._begun: WeakSet[_LateIterator] = WeakSet()

    def made(self, iterator: _LateIterator) -> None:
        """It waits until a batch is asked for."""
        self._waiting.append(ref(iterator))

    def begin(self) -> None:
        """Begin all that wait, but those that Lightning has dropped, in the order in which it made them.

        So several loaders draw from one random stream in the order of stock.
        """
        waiting, self._waiting = [each() for each in self._waiting], []
        for iterator in waiting:
            if iterator is not None:
                iterator.batches = iter(iterator.prepared)
                self._begun.add(iterator)

    def end(self) -> None:
        """The epoch is over: nobody reads on."""
        for iterator in self._begun:
            iterator.batches = iter(())
        self._begun.clear()


class LateLoader:
    """A prepared DataLoader. Attributes are those of the user's DataLoader, where Lightning sets some."""

    _prepared: Any
    _loader: DataLoader
    _iterators: LateIterators

    def __init__(self, prepared: Any, loader: DataLoader, iterators: LateIterators) -> None:
        vars(self).update(_prepared=prepared, _loader=loader, _iterators=iterators)

    def __len__(self) -> int:
        return len(self._prepared)

    def __iter__(self) -> _LateIterator:
        return _LateIterator(self._prepared, self._iterators)

    def __getattr__(self, name: str) -> Any:
        if name in ("_prepared", "_loader", "_iterators"):  # while unpickling they are not there yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


class _LateIterator:
    """``batches``: the iterator that has begun; None before."""

    def __init__(self, prepared: Any, iterators: LateIterators) -> None:
        self.prepared = prepared
        self.batches: Iterator[Any] | None = None
        self._iterators = iterators
        iterators.made(self)

    def __iter__(self) -> _LateIterator:
        return self

    def __next__(self) -> Any:
        if self.batches is None:
            self._iterators.begin()
        assert self.batches is not None
        return next(self.batches)

"""Accelerate's DataLoader of one process, over this worker's parts of the batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.utils import send_to_device
from torch.utils.data import IterableDataset

from fluidtune import elastic

from ..written_loop import WrittenLoop


class DividedLoader(DataLoaderShard):
    """What ``accelerator.prepare`` has made of a DataLoader, with its attributes, divided by `elastic.prepare`.

    Where a trial has one worker it is Accelerate's own iterator, which fetches one batch ahead. Where it has several
    nothing is fetched ahead. ``parts``: what this worker has of the batches that were yielded and not worked on, in
    their order (see `elastic.parts`); empty where batches are not divided. ``loop``: of the script that reads it; None:
    the reader takes the parts from there and says which it works on.

    Raises:
        TypeError: it cannot be divided; the message says why.
    """

    iteration: int

    def __init__(self, loader: Any, accelerator: Accelerator, loop: WrittenLoop | None = None) -> None:
        why = undivided_because(loader)
        if why is not None:
            raise TypeError(why)
        self.__dict__.update(vars(loader))
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
            # It would make one when it is first read: a joiner's has not been. It seeds it for each epoch.
            sampler.generator = torch.Generator().manual_seed(sampler.initial_seed)
        self._undivided, self._accelerator = loader, accelerator
        self._loop = loop
        self.base_dataloader = elastic.prepare(loader.base_dataloader)
        self.parts: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.parts.clear()
        if self._loop is None:
            yield from self._counted()
        elif self._loop.trains:
            yield from self._loop.pass_over(self._counted(), divided=True)
        else:
            self._undivided.iteration = self.iteration
            yield from self._loop.pass_over(self._undivided, divided=False)
            self.iteration = self._undivided.iteration

    def _counted(self) -> Iterator[Any]:
        """A divided loader fetches nothing ahead: by its length it knows which batch is the last one."""
        number = 0
        for batch in self._divided():
            number += 1
            yield batch
        if number != len(self):
            why = f"the training data has {number} batches, and its length says {len(self)}"
            if self._loop is None:
                elastic.one_worker(f"Transformers: {why}")
            else:
                self._loop.cannot(why)

    def _divided(self) -> Iterator[Any]:
        # A rehearsal has a worker that is alone and does not lead: it fetches as those do that it is compared with.
        if elastic.width() == 1 and elastic.is_leader():
            yield from super().__iter__()
            return
        self.begin()
        self.set_epoch(self.iteration)
        if self._loop is None:
            batches = elastic.parts(self.base_dataloader)
        else:
            batches = ((batch, None) for batch in self.base_dataloader)
        for number, (batch, part) in enumerate(batches, start=1):
            if self.device is not None:
                batch = send_to_device(batch, self.device, non_blocking=self._accelerator.non_blocking)
            if self._loop is not None:
                self._loop.read(batch)
            self.end_of_dataloader = number == len(self)
            if part is not None:
                self.parts.append(part)
            yield batch
        self.iteration += 1
        self.end()


def undivided_because(loader: Any) -> str | None:
    """Why the batches of a loader of Accelerate's cannot be divided, in a line; None: `elastic.prepare` decides."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return "the training data is an IterableDataset, of which no worker can take its part"
    if not issubclass(type(loader), DataLoaderShard):
        return f"the training data is a {type(loader).__name__}, not a DataLoader that Accelerate reads in one process"
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return "the training data has no length, as its batch sampler has none"
    if loader.use_stateful_dataloader:
        return "a StatefulDataLoader keeps a place in its data that a new worker lacks"
    return None

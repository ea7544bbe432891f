"""A training loop that the script has written with a framework's helper, where its trial can have several workers.

Accelerate's `Accelerator` and Lightning's `Fabric` are such helpers. Their loaders give this worker's parts of the
batches while a model is in training mode, and whole batches while all are in evaluation mode. What the helper gathers
or reduces in training is what one process with the whole batch has; in evaluation each worker has all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fluidtune import elastic


class WrittenLoop:
    """The loop of one helper, whose name is in the lines of the event log; a part of the trial's state.

    ``plain``: the trial keeps one worker. Its loop has no boundaries then, and no commits: not all of it is prepared.
    ``loaders``: those that are divided; each has its number of passes in ``iteration``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.plain = False
        self.models: list[torch.nn.Module] = []
        self.loaders: list[Any] = []
        #: The passes that are being read, the innermost last, and whether each is divided.
        self._passes: dict[object, bool] = {}
        #: Of this worker's part of the batch that was read last; None: that cannot be told.
        self._samples: int | None = None

    def keep_one_worker(self, why: object) -> None:
        """Before the loop begins: it cannot be divided."""
        self.plain = True
        self.cannot(why)

    def cannot(self, why: object) -> None:
        """The loop does what several workers cannot do."""
        elastic.one_worker(f"{self._name}: {why}")

    def epochs(self, start: int, stop: int) -> Iterable[int]:
        """As `elastic.epochs`."""
        return range(start, stop) if self.plain else elastic.epochs(start, stop)

    @property
    def trains(self) -> bool:
        """Whether a pass that begins now is divided."""
        return torch.is_grad_enabled() and any(model.training for model in self.models)

    @property
    def together(self) -> bool:
        """Whether several workers have a part each. In training that is so, except amid a pass that is not divided."""
        return elastic.width() > 1 and self.trains and (not self._passes or [*self._passes.values()][-1])

    def pass_over(self, batches: Iterable[Any], *, divided: bool) -> Iterator[Any]:
        """The batches of one pass over a loader, in the mode in which it has begun."""
        this = object()
        self._passes[this] = divided
        try:
            for number, batch in enumerate(batches):
                if number and self.trains != divided:
                    self.cannot(
                        "the mode of the models changes between two batches of one pass over a loader, which would be "
                        "divided in one mode and not in the other: call train() or eval() before the pass"
                    )
                yield batch
        finally:
            del self._passes[this]

    def read(self, batch: Any) -> None:
        """The loop gets this worker's part of a batch."""
        self._samples = _samples_of(batch)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all workers that count, in the order of the batch. A number is taken for a mean over samples."""
        if not tensor.dim():
            return self.reduced(tensor, "mean")
        rows = tensor.detach()
        kind = zlib.crc32(f"{tuple(rows.shape[1:])} {rows.dtype}".encode())
        sizes, kinds = elastic.gather(torch.tensor([len(rows) if elastic.samples(1) else 0, kind])).unbind(1)
        if (kinds != kind).any():  # so it is in all workers
            self.cannot("rows of several lengths or types are gathered in training: pad them to one length")
        padded = rows.new_zeros((int(sizes.max()), *rows.shape[1:]))
        padded[: min(len(rows), len(padded))] = rows[: len(padded)]
        return torch.cat([each[:size] for each, size in zip(elastic.gather(padded), sizes.tolist(), strict=True)])

    def reduced(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The sum, or the mean over samples, of the workers that count; or the smallest or largest of all."""
        if op in ("min", "max"):
            return elastic.reduce(tensor, "min" if op == "min" else "max")
        if op not in ("sum", "mean"):
            self.cannot(f"{op!r} is none of the reductions 'sum', 'mean', 'min' and 'max'")
        if op == "mean" and self._samples is None:
            self.cannot("a mean over the samples of a batch whose size cannot be told")
        share: float = elastic.samples(1 if op == "sum" else self._samples or 0)
        if op == "mean":
            share /= elastic.reduce(torch.tensor(float(share))).item()
        return elastic.reduce(tensor * share if share else torch.zeros_like(tensor * share))

    def state_dict(self) -> dict[str, Any]:
        """The passes that are done, by which samplers are seeded."""
        return {"passes": [loader.iteration for loader in self.loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the loaders go on as those of another worker."""
        for loader, passes in zip(self.loaders, state["passes"], strict=True):
            loader.iteration = passes


def _samples_of(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for each in parts if (found := _samples_of(each)) is not None), None)

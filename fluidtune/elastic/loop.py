"""The four functions that a user's training loop calls. Without a session they do what plain PyTorch does.

A session is there only in a FluidTune worker; a script that runs under stock Ray Tune or plain Python gets
its own objects back, `range`, and its own mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .current_session import current


def prepare(*objects: Any) -> Any:
    """Hand over what the trial consists of: modules, optimizers, LR schedulers, DataLoaders, gradient
    scalers.

    Returns the same objects in the same order (a tuple; the object itself if it is one); a DataLoader comes
    back as a wrapper that yields this worker's share of each batch. Call it once they are on their device,
    before `epochs`. The loss must be a mean over the samples of the batch: gradients are weighted by how many
    of them this worker had.

    Raises TypeError for an object that has no ``state_dict``/``load_state_dict``, for a DataLoader whose data
    cannot be divided (an IterableDataset, ``batch_size=None``), for sparse embeddings and for lazy modules.
    """
    session = current()
    prepared = objects if session is None else session.prepare(*objects)
    return prepared[0] if len(prepared) == 1 else prepared


def epochs(start: int, stop: int) -> Iterable[int]:
    """Yield start .. stop-1 as `range` does. Each turn is a boundary, where the trial can be resized.

    After a restart it goes on where the last commit was, unless ``start`` is beyond that: then the user's own
    checkpoint, from which ``start`` came, is the newer one and the commit is not used.
    """
    session = current()
    return range(start, stop) if session is None else session.epochs(start, stop)


def samples(n: int) -> int:
    """How many of the ``n`` samples of the batch at hand count for this worker: n, or 0.

    0 when the batch has fewer samples than the trial has workers: a surplus worker then gets a stand-in, a
    copy of another's sample, so that it takes part in the step; it must not be counted in a mean.
    """
    session = current()
    return n if session is None else session.samples(n)


def mean(total: float | torch.Tensor, count: float | torch.Tensor) -> float:
    """The mean over all workers' samples: the sum of their ``total`` over the sum of their ``count``.

    ``total`` is the sum of a quantity over the samples that this worker had, ``count`` how many these were
    (see `samples`). Every worker must call it, and gets the same number. Raises ZeroDivisionError if no
    worker had a sample.
    """
    session = current()
    if session is None:
        return float(total) / float(count)
    return session.mean(float(total), float(count))

"""What a framework calls that owns its loop over epochs, such as Lightning's Trainer; other loops need `loop` only.

    epoch = 0
    while epoch is not None and epoch < stop:
        epoch = elastic.boundary(epoch, stop)       # perhaps a later one, that of a commit or of a group
        ...                                         # train for one epoch
        epoch += 1
    elastic.boundary(epoch, stop)

All workers of a trial call these functions, in one order. `rank` and `width` cost nothing and may be called by one
alone. If another worker calls something else, all get `CannotDivide` within seconds, and the trial goes
on with one worker. With one worker, or without a session (stock Ray Tune, plain Python), they give what one process
needs and wait for nobody. The same holds in a worker that has not come to its first boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from .data.batches import BatchPart
from .data.loader import ElasticLoader
from .group.current_session import current
from .group.session import ElasticSession


def rank() -> int:
    """This worker's number in its trial, from 0 to ``width() - 1``; 0 where there is one. It changes at boundaries."""
    session = current()
    return 0 if session is None else session.rank


def width() -> int:
    """The number of workers that the trial has now, this one included; it changes at boundaries."""
    session = current()
    return 1 if session is None else session.width


def reduce(tensor: torch.Tensor, op: Literal["sum", "mean", "min", "max"] = "sum") -> torch.Tensor:
    """All workers' tensors, combined element by element; a new tensor without gradients, the same in all workers.

    ``tensor`` has the same shape and dtype in all workers, and is on the CPU or on the trial's device. The result has
    this shape, dtype and device; a mean of integers has torch's default float type. The workers count equally, however
    many samples each has: `mean` counts samples.

    Raises:
        ValueError: ``op`` is another word.
    """
    if op not in ("sum", "mean", "min", "max"):
        raise ValueError(f"elastic.reduce() got op={op!r}: expected 'sum', 'mean', 'min' or 'max'")
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    if op == "mean" and not (whole.is_floating_point() or whole.is_complex()):
        whole = whole.to(torch.get_default_dtype())
    session = _of_several()
    if session is None:
        return whole
    carried = _carried(whole)
    if op in ("min", "max"):
        rows = gather(carried)
        carried = rows.amin(0) if op == "min" else rows.amax(0)
    else:
        session.backend.allreduce_(carried, f"elastic.reduce() of {tuple(whole.shape)}")
        carried = carried / session.width if op == "mean" else carried
    return carried.to(whole.dtype)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """All workers' tensors, stacked in the order of their ranks: of shape (width, \\*tensor.shape), without gradients.

    ``tensor`` has the same shape and dtype in all workers. It is on the CPU or on the trial's device, as the result is.
    """
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    session = _of_several()
    if session is None:
        return own.clone().unsqueeze(0)
    data = own.reshape(-1).view(torch.uint8)  # not every library knows every type
    rows = session.backend.gather(data, f"elastic.gather() of {tuple(own.shape)}")
    return rows.view(own.dtype).reshape(session.width, *own.shape)


def broadcast(value: Any) -> Any:
    """The leader's ``value``, in every worker; what the others give is not looked at.

    It must be picklable. A tensor arrives on the device that it has in the leader: send it on the CPU.
    """
    session = _of_several()
    return value if session is None else session.backend.broadcast_object(value, "elastic.broadcast()")


def barrier() -> None:
    """Return when all workers have called it."""
    session = _of_several()
    if session is not None:
        session.backend.exchange(torch.zeros(1, dtype=torch.float64), "elastic.barrier()")


def agreed(wish: bool, by: Literal["all", "any"] = "all") -> bool:
    """What all workers decide: whether ``wish`` is true in all of them, or in any of them. The same in all workers.

    Raises:
        ValueError: ``by`` is another word.
    """
    if by not in ("all", "any"):
        raise ValueError(f"elastic.agreed() got by={by!r}: expected 'all' or 'any'")
    session = _of_several()
    if session is None:
        return bool(wish)
    wishes = session.backend.exchange(torch.tensor([float(wish)], dtype=torch.float64), f"elastic.agreed(by={by!r})")
    return bool(wishes.all() if by == "all" else wishes.any())


def boundary(epoch: int, stop: int | None = None) -> int | None:
    """The boundary before ``epoch``, at which the trial can be resized; for a loop that cannot iterate over `epochs`.

    ``stop``: the loop's epochs are those before it, as far as is known; None: it is not known. The loop calls this
    before each of its epochs, and once more with ``epoch == stop`` when it has ended, be it early. The call after that
    begins another loop.

    Returns the epoch that runs next. It is ``epoch``, except at a loop's first boundary. There it may be a later one,
    up to ``stop``, because this worker joins the trial or goes on from its commit; what was prepared has the state of
    that epoch then. None: the trial is past this loop, which must run no epoch; the loop after it has the state.

    Call `prepare` before. A new iterator over a prepared DataLoader is made after it: one that was made before cannot
    be read on when the trial is resized.
    """
    session = current()
    return epoch if session is None else session.before_epoch(epoch, stop)


def parts(loader: Iterable[Any]) -> Iterator[tuple[Any, BatchPart | None]]:
    """Iterate over a DataLoader; with each batch, what this worker has of it, for `work_on`.

    For a loop that fetches several batches before it computes with the first, as one does that accumulates gradients:
    nobody else could tell which batch a backward pass is about, where their sizes differ. ``part.weight`` is the share
    of the batch's samples that this worker has: the worker's gradients count by it. It is 0 if the worker has only a
    stand-in, or computes for a comparison what another worker's gradients are taken from. In place of a part there is
    None where the batch is not divided.
    """
    return loader.parts() if isinstance(loader, ElasticLoader) else ((batch, None) for batch in loader)


def work_on(part: BatchPart | None) -> None:
    """From now on the loop computes with the batch that came with this part; see `parts`. All workers call it."""
    session = current()
    if session is not None:
        session.work_on(part)


def one_worker(why: str) -> None:
    """The trial must have one worker from now on, for a reason that the framework has found: a line for the event log.

    If it has several, all call it at the same place, and the trial goes on with one from its last commit.

    Raises:
        CannotDivide: the trial has several workers.
    """
    session = current()
    if session is not None:
        session.keep_one_worker(why)


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a type that every library adds up, and of which torch finds the smallest."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(torch.int64)
    return tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor


def _of_several() -> ElasticSession | None:
    """The session, if the trial has several workers."""
    session = current()
    return session if session is not None and session.width > 1 else None

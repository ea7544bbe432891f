"""A batch of a `TensorDataset` in one operation for each tensor, where a DataLoader takes one for each sample.

A DataLoader asks a dataset for each sample of a batch and stacks them. In a search over small models that is a third of
an iteration and more (`python -m benchmarks.iteration`). The batch is fetched at once only where torch's own code says
what the loader would have given, to the last bit, with the same type, shape, dtype and strides:

- the dataset is a `TensorDataset`, or `Subset` of one (`random_split` makes these), and no class derived from them;
- the loader has torch's `default_collate`, and no worker processes;
- the batch sampler gives lists of ints. What draws them does not matter: it is asked as ever;
- the tensors are plain ones in the CPU's memory, each row after the other, which need no gradient.

All else is fetched as the loader does it, and so is a batch for which the one operation fails: for an index beyond the
end the user sees the error of stock torch. A tensor on a GPU is fetched by the loader, because its rows were never
compared there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate

from .loop_draws import Part

#: Types of an index that select one row of a tensor.
_INDICES = frozenset({int, numpy.int64, numpy.int32})
#: Types of the indices of a `Subset` whose items are looked up without effects of their own.
_LISTS = (list, tuple, range, numpy.ndarray)


class WholeBatches(Dataset):
    """Stands for the dataset of a DataLoader, and has batches that are collated already. See `in_whole_batches`."""

    def __init__(self, dataset: Dataset, collate_fn: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate_fn

    def __getitems__(self, indices: Any) -> Any:
        """The batch of these indices, as the DataLoader would have made it."""
        try:
            batch = self._rows(indices) if _stacks_as_they_are() else None
        except Exception:  # whatever it is, the loader's own way says it in its own words
            batch = None
        if batch is not None:
            return batch
        dataset: Any = self._dataset
        if getattr(dataset, "__getitems__", None):
            return self._collate(dataset.__getitems__(indices))
        return self._collate([dataset[index] for index in indices])

    def _rows(self, indices: Sequence[Any]) -> list[torch.Tensor] | None:
        """Each tensor's rows; None: it is not known what the loader would give."""
        if type(indices) not in (list, tuple, Part):
            return None
        dataset: Any = self._dataset
        while type(dataset) is Subset:
            among: Any = dataset.indices
            if type(among) not in _LISTS:
                return None
            indices = [among[index] for index in indices]
            dataset = dataset.dataset
        tensors = dataset.tensors if type(dataset) is TensorDataset else ()
        if not indices or not tensors or not _INDICES.issuperset(map(type, indices)):
            return None
        if not all(map(_is_plain, tensors)):
            return None
        at = torch.from_numpy(numpy.array(indices, dtype=numpy.int64))
        return [tensor.index_select(0, at) for tensor in tensors]


def in_whole_batches(dataset: Dataset, collate_fn: Callable[[Any], Any], processes: int) -> WholeBatches | None:
    """What to read in the place of ``dataset``, with `as_it_is` for its ``collate_fn``; None: read the dataset itself.

    ``processes``: worker processes of the loader.
    """
    if processes or collate_fn is not default_collate:
        return None
    whole: Any = dataset
    while type(whole) is Subset:
        if "__getitems__" in vars(whole) or not _is_torchs(Subset.__getitems__, Subset):
            return None
        whole = whole.dataset
    if type(whole) is not TensorDataset or hasattr(whole, "__getitems__"):
        return None
    return WholeBatches(dataset, collate_fn) if _is_torchs(TensorDataset.__getitem__, TensorDataset) else None


def reader_of(loader: DataLoader) -> DataLoader:
    """A DataLoader that gives the batches of this one and takes from its samplers and streams what this one takes."""
    if type(loader) is not DataLoader:
        return loader
    whole = in_whole_batches(loader.dataset, loader.collate_fn, loader.num_workers)
    if whole is None:
        return loader
    return DataLoader(
        whole,
        batch_sampler=loader.batch_sampler,
        collate_fn=as_it_is,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        generator=loader.generator,
    )


def as_it_is(batch: Any) -> Any:
    """The ``collate_fn`` of a loader whose dataset has batches that are collated."""
    return batch


def _is_plain(tensor: Any) -> bool:
    """Whether a row is a plain copy of numbers, and rows stacked lie as they lie in this tensor."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.is_nested or tensor.requires_grad:
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return _in_rows(tensor.shape, tensor.stride())


@lru_cache(maxsize=32)  # more tensors than a dataset has; computing it takes as long as fetching the rows
def _in_rows(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the last dimension lies closest, and so on, and there are numbers at all.

    A stack of rows that are channels_last is so, too. Without numbers, `index_select` checks no bounds.
    """
    return bool(shape) and 0 not in shape and stride == tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1]


def _stacks_as_they_are() -> bool:
    """Whether `default_collate` stacks what is in a tuple: no entry of the user's says otherwise, nor does autocast."""
    table = collate.default_collate_fn_map
    if table.get(torch.Tensor) is not collate.collate_tensor_fn or issubclass(tuple, tuple(table)):
        return False
    return not torch.is_autocast_enabled("cpu")  # it casts what is stacked


def _is_torchs(method: Any, owner: type) -> bool:
    """Whether a method is the one that torch wrote, and was not replaced."""
    code: Any = getattr(method, "__code__", None)
    return code is not None and bool(code.co_filename == owner.__init__.__code__.co_filename)  # type: ignore[misc]

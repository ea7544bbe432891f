"""What a DataLoader keeps from one epoch to the next: its generators, its samplers' settings, its processes.

The user's DataLoader itself is iterated. Its data is no state: a data set that changes shows in the proof of a commit.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

#: Attributes of a sampler that are no settings of its own: the data, another sampler, and what `generators_of` finds.
_OTHERS = {"data_source", "sampler", "batch_sampler", "dataset", "generator"}
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, numpy.ndarray)


def generators_of(loader: DataLoader) -> list[torch.Generator]:
    """The user's own generators that determine the order of the data, each once."""
    held = [getattr(holder, "generator", None) for holder in (loader, *_samplers(loader))]
    return list({id(each): each for each in held if isinstance(each, torch.Generator)}.values())


def settings_of(loader: DataLoader) -> list[dict[str, Any]]:
    """For each sampler its state: weights, indices, the number of an epoch; and whether the processes have started."""
    found = []
    for sampler in _samplers(loader):
        if _has_state(sampler):
            found.append(sampler.state_dict())
        else:
            own = getattr(sampler, "__dict__", {}).items()
            found.append({name: value for name, value in own if _is_setting(name, value, loader)})
    return [*found, {"processes": getattr(loader, "_iterator", None) is not None}]


def load_settings(loader: DataLoader, settings: list[dict[str, Any]]) -> None:
    """Put back what `settings_of` returned. The random streams are put back after it: starting processes draws."""
    *samplers, processes = settings
    for sampler, state in zip(_samplers(loader), samplers, strict=True):
        if _has_state(sampler):
            sampler.load_state_dict(state)
        else:
            for name, value in state.items():
                now = getattr(sampler, name, None)
                device = now.device if isinstance(now, torch.Tensor) else None
                setattr(sampler, name, value.to(device) if isinstance(value, torch.Tensor) else value)
    # Processes that persist draw their seed once, when they start: with the first iterator, which torch keeps here.
    if processes["processes"] and loader.persistent_workers and getattr(loader, "_iterator", None) is None:
        loader._iterator = loader._get_iterator()


def _samplers(loader: DataLoader) -> list[Any]:
    batches = loader.batch_sampler
    held = (batches, getattr(batches, "sampler", None), loader.sampler)
    return list({id(each): each for each in held if each is not None}.values())


def _has_state(sampler: Any) -> bool:
    return all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_setting(name: str, value: Any, loader: DataLoader) -> bool:
    if name in _OTHERS or value is loader.dataset:
        return False
    if isinstance(value, list):
        return all(isinstance(each, bool | int | float | str) for each in value)
    return isinstance(value, _PLAIN)

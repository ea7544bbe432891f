"""A trial's state as one value, which is taken from the user's objects and put back into them.

It covers modules, optimizers, DataLoaders and all other objects with ``state_dict`` and ``load_state_dict`` (LR
schedulers, gradient scalers). Objects are identified by the order in which `elastic.prepare` got them: every process
that runs the trial prepares the same objects in the same order.
"""

from __future__ import annotations

import pickle
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..random_streams import capture_streams, restore_streams
from .gradients import Accumulated
from .loaders import generators_of, load_settings, settings_of
from .plain_state import Drawing, State
from .snapshot import Snapshot, restored, taken


class TrialState:
    """The user's objects of one trial; their tensors are on ``device``. ``pickling``: see `taken`."""

    def __init__(self, device: torch.device, pickling: ModuleType = pickle) -> None:
        self._device = device
        self._accelerator = None if device.type == "cpu" else str(device)
        self._stateful: list[Any] = []
        self._pickling = pickling
        self._loose: list[torch.Tensor] = []  # parameters of an optimizer that belong to no module
        self._loaders: list[DataLoader] = []
        self._begun_as: dict[str, str] = {}  # `_make_up` when the loop began
        self._gradients = Accumulated()

    def add(self, objects: tuple[Any, ...]) -> None:
        """Add objects to the state; see `elastic.prepare`."""
        for obj in objects:  # before the optimizers, to know which of their parameters belong to no module
            if isinstance(obj, torch.nn.Module):
                for name, parameter in obj.named_parameters():
                    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                        raise TypeError(
                            f"parameter {name} has no shape yet: run one batch through the lazy module before "
                            "elastic.prepare()"
                        )
                    self._gradients.watch(parameter)
        for obj in objects:
            self._add(obj)

    def _add(self, obj: Any) -> None:
        if isinstance(obj, DataLoader):
            if all(obj is not known for known in self._loaders):
                self._loaders.append(obj)
            return
        if Drawing.fits(obj):
            if all(obj is not getattr(known, "generator", None) for known in self._stateful):
                self._stateful.append(Drawing(obj))
            return
        if not all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"elastic.prepare() got a {type(obj).__name__}: expected a torch Module, Optimizer, LR "
                "scheduler, DataLoader, a random generator, or another object with state_dict() and "
                "load_state_dict(); elastic.state(name=value) makes one of plain values"
            )
        if any(obj is known for known in self._stateful):
            return
        if isinstance(obj, torch.optim.Optimizer):
            parameters = [p for group in obj.param_groups for p in group["params"]]
            self._loose += [parameter for parameter in parameters if self._gradients.watch(parameter)]
        self._stateful.append(obj)

    @property
    def objects(self) -> list[Any]:
        """What was prepared, as the loop has it."""
        own = [obj.generator if isinstance(obj, Drawing) else obj for obj in self._stateful]
        return [*own, *self._loaders]

    def loop_begins(self) -> None:
        """The boundary before the first epoch of a loop: other processes get there with the same objects."""
        self._begun_as = self._make_up()

    def obstacle(self) -> str | None:
        """Why no other process could go on from this boundary with what it has when the loop begins."""
        now = self._make_up()
        changed = next((name for name in now if now[name] != self._begun_as.get(name)), None)
        if changed is None:
            return None
        return (
            f"the loop has changed what it prepared: {changed} {self._begun_as.get(changed, 'nothing')} before, "
            f"{now[changed]} now; do that before elastic.epochs() to let its work be kept"
        )

    def _make_up(self) -> dict[str, str]:
        """By part, what another process must have of it to take the state over."""
        found = {"objects": str(len(self._stateful)), "DataLoaders": str(len(self._loaders))}
        for name, obj in zip(self.names, self._stateful, strict=True):
            if isinstance(obj, torch.optim.Optimizer):
                sizes = [len(group["params"]) for group in obj.param_groups]
                found[name] = f"param groups of {sizes} tensors"
            elif isinstance(obj, torch.nn.Module):
                parameters = list(obj.parameters())
                elements = sum(parameter.numel() for parameter in parameters)
                found[name] = f"{len(parameters)} parameters of {elements} elements"
        return found

    @property
    def names(self) -> list[str]:
        """What each prepared object is called in a message, such as "optimizer 2"; a DataLoader is not among them."""
        kinds = [_kind_of(obj) for obj in self._stateful]
        seen: Counter[str] = Counter()
        names = []
        for kind in kinds:
            seen[kind] += 1
            names.append(f"{kind} {seen[kind]}" if kinds.count(kind) > 1 else kind)
        return names

    def capture(self) -> Snapshot:
        """A snapshot of the live objects, and of the process' random streams."""
        now = self.now()
        return taken(now, self._stateful, self._pickling, list(map(_to_be_placed, self._stateful, now["stateful"])))

    def load(self, snapshot: Snapshot) -> None:
        """Put a snapshot back into the live objects, and into the process' random streams.

        Raises:
            ValueError: it is the state of other objects.
        """
        state = self.readable(snapshot, self._device)
        have, want = _counts(self.now()), _counts(state)
        if have != want:
            raise ValueError(
                f"this state is of other objects than elastic.prepare() got: it has {want}, the loop {have}; "
                "prepare the same objects in the same order in every run of a trial"
            )
        for obj, part in zip(self._stateful, state["stateful"], strict=True):
            obj.load_state_dict(part)
            if isinstance(obj, torch.optim.Optimizer):
                _keep_types(obj, part)
        with torch.no_grad():
            for parameter, value in zip(self._loose, state["loose"], strict=True):
                parameter.copy_(value)
        self._gradients.load(state["parameters"])
        for loader, settings in zip(self._loaders, state["samplers"], strict=True):
            load_settings(loader, settings)
        for generators, parts in zip(self._generators(), state["generators"], strict=True):
            for generator, part in zip(generators, parts, strict=True):
                generator.set_state(part)
        restore_streams(state["streams"], self._accelerator)

    def now(self) -> dict[str, Any]:
        """The state of the live objects as it is, to be compared with what `readable` returns."""
        return {
            "stateful": [obj.state_dict() for obj in self._stateful],
            "loose": list(self._loose),
            "parameters": self._gradients.view(),
            "generators": [[generator.get_state() for generator in found] for found in self._generators()],
            "samplers": [settings_of(loader) for loader in self._loaders],
            "streams": capture_streams(self._accelerator),
        }

    def readable(self, snapshot: Snapshot, device: str | torch.device = "cpu") -> dict[str, Any]:
        """What a snapshot holds, as new objects. ``device``: see `restored`. Raises ValueError as `load`."""
        found: dict[str, Any] = restored(snapshot, self._stateful, self._pickling, torch.device(device), self.now())
        return found

    def close(self) -> None:
        """Let go of the objects; idempotent."""
        self._gradients.close()

    def _generators(self) -> list[list[torch.Generator]]:
        return [generators_of(loader) for loader in self._loaders]


def _kind_of(obj: Any) -> str:
    if isinstance(obj, torch.nn.Module):
        return "module"
    if isinstance(obj, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if isinstance(obj, State):
        return "elastic.state()"
    return "random generator" if isinstance(obj, Drawing) else type(obj).__name__


def _to_be_placed(obj: Any, part: Any) -> Any:
    """What ``obj`` does not itself copy to its device when it loads ``part``."""
    if isinstance(obj, torch.optim.Optimizer):
        return [value for name, value in part.items() if name != "state"]
    return None if isinstance(obj, torch.nn.Module) else part


def _keep_types(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Give the optimizer's state the types that it had in the optimizer that it is from.

    torch's `load_state_dict` casts it to the type of its parameter: a restarted trial would round NAdam's
    ``mu_product``, a float32, in another way.
    """
    numbers = [number for group in loaded["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for name, value in loaded.get("state", {}).get(number, {}).items():
            now = state.get(name)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                state[name] = value.detach().to(now.device, copy=True)


def _counts(state: dict[str, Any]) -> dict[str, Any]:
    """The number of objects of each kind in a state, for the error when a state does not fit."""
    counts: dict[str, Any] = {name: len(state[name]) for name in ("stateful", "loose")}
    return {**counts, "generators": [len(found) for found in state["generators"]]}

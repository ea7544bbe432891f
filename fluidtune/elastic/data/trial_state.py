"""A trial's state as one value, which is taken from the user's objects, put back into them, and sent to joiners.

It covers modules, optimizers, DataLoaders and all other objects with ``state_dict`` and ``load_state_dict`` (LR
schedulers, gradient scalers). Objects are identified by the order in which `elastic.prepare` got them: every worker
prepares the same objects in the same order.
"""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from fluidtune.error_lines import failure

from ..alike.digests import digest_of, digest_of_tensors, distance_between, plain_leaves
from ..commits.committable import CommittableState
from ..random_streams import capture_streams, restore_streams
from ..transport.base import CollectiveBackend
from ..transport.trees import broadcast_tree, copied, on_devices, put_back, unsendable
from .batchnorm import GlobalBatchStatistics
from .gradients import CAPTURED, GradientReducer
from .group_view import GroupView
from .leaves import Leaves
from .loader import ElasticLoader, generators_of, sampler_contents
from .loop_draws import OwnDropout, seed_of
from .plain_state import Drawing, State
from .steering import Steering, steppers


class TrialState(CommittableState):
    """The user's objects of one trial in one worker; their tensors are on ``device``. ``pickling``: see `Leaves`."""

    def __init__(self, group: GroupView, device: torch.device, pickling: ModuleType = pickle) -> None:
        self._group = group
        self._device = device
        self._gpu = str(device) if device.type == "cuda" else "cuda"
        self._on_cores = device.type == "cpu"
        self._stateful: list[Any] = []
        self._leaves = Leaves(pickling, self._stateful, device)
        self._loose: list[torch.Tensor] = []  # parameters of an optimizer that belong to no module
        self._loaders: list[ElasticLoader] = []
        self._steps = 0  # of all optimizers, in this turn
        self._begun_as: dict[str, str] = {}  # `_make_up` when the loop began
        self._gradients = GradientReducer(group)
        self._statistics = GlobalBatchStatistics(group)
        self._steering = Steering(group)
        self._dropout = OwnDropout(lambda: group.common.are_common or group.outputs.watched)

    def add(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add objects to the state, and return what the user works with; see `elastic.prepare`."""
        for obj in objects:  # before the optimizers, to know which of their parameters belong to no module
            if isinstance(obj, torch.nn.Module):
                self._gradients.add(obj)
        return tuple(self._add(obj) for obj in objects)

    def _add(self, obj: Any) -> Any:
        if isinstance(obj, ElasticLoader):
            return obj
        if isinstance(obj, DataLoader):
            self._loaders.append(ElasticLoader(obj, self._group))
            return self._loaders[-1]
        if Drawing.fits(obj):
            if all(obj is not getattr(known, "generator", None) for known in self._stateful):
                self._stateful.append(Drawing(obj))
            return obj
        if not all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"elastic.prepare() got a {type(obj).__name__}: expected a torch Module, Optimizer, LR "
                "scheduler, DataLoader, a random generator, or another object with state_dict() and "
                "load_state_dict(); elastic.state(name=value) makes one of plain values"
            )
        if any(obj is known for known in self._stateful):
            return obj
        if isinstance(obj, torch.optim.Optimizer):
            parameters = [p for group in obj.param_groups for p in group["params"]]
            for each in steppers(obj):
                self._gradients.watch_steps(each)
                self._steering.watch(each)
                each.register_step_post_hook(self._step_taken)
            self._loose += [parameter for parameter in parameters if self._gradients.watch(parameter)]
        self._stateful.append(obj)
        return obj

    def loop_begins(self) -> None:
        self._begun_as = self._make_up()

    def obstacle(self, lasting: bool = False) -> str | None:
        if any(loader.reuses_iterator for loader in self._loaders):
            return (
                "the loop keeps an iterator over a prepared DataLoader from one turn to the next: make a new one in "
                "each turn of elastic.epochs() to let the trial grow"
            )
        if self._gradients.captured:
            return CAPTURED
        if self._on_cores and any(parameter.is_cuda for parameter in self._gradients.parameters):
            return "the loop trains on a GPU that the trial was not given: give each trial one to let it grow"
        now = self._make_up()
        if now != self._begun_as:
            changed = next(name for name in now if now[name] != self._begun_as.get(name))
            return (
                f"the loop has changed what it prepared: {changed} {self._begun_as.get(changed, 'nothing')} before, "
                f"{now[changed]} now; do that before elastic.epochs() to let the trial grow"
            )
        if lasting and (cannot := self._cannot_be_sent()) is not None:
            return f"the loop has prepared an object with {cannot}, which cannot be sent to another worker"
        if not lasting and any(loader.undecided for loader in self._loaders):
            return "the loop has an iterator over a prepared DataLoader that it may keep"
        return None

    def _cannot_be_sent(self) -> str | None:
        try:
            view = self._view()
        except Exception as error:
            return f"a state_dict() that fails ({failure(error)})"
        return unsendable(view) or self._leaves.trouble(view["stateful"])

    def _make_up(self) -> dict[str, str]:
        """By part, what another process must have of it to take the state over."""
        found = {"objects": str(len(self._stateful)), "DataLoaders": str(len(self._loaders))}
        for number, loader in enumerate(self._loaders):
            found[f"the sampler of DataLoader {number}"] = sampler_contents(loader)
        for number, obj in enumerate(self._stateful):
            if isinstance(obj, torch.optim.Optimizer):
                sizes = [len(group["params"]) for group in obj.param_groups]
                found[f"optimizer {number}"] = f"param groups of {sizes} tensors"
            elif isinstance(obj, torch.nn.Module):
                parameters = list(obj.parameters())
                elements = sum(parameter.numel() for parameter in parameters)
                found[f"module {number}"] = f"{len(parameters)} parameters of {elements} elements"
        return found

    def facts(self, weights: bool) -> dict[str, float]:
        optimizers = [obj for obj in self._stateful if isinstance(obj, torch.optim.Optimizer)]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        plain = [
            [len(group["params"]), *plain_leaves({name: v for name, v in group.items() if name != "params"})]
            for group in groups
        ]
        found = {
            "optimizer steps": float(self._steps),
            "batches": float(sum(loader.read for loader in self._loaders)),
            "learning rate": float(groups[0]["lr"]) if groups and "lr" in groups[0] else 0.0,
            "param groups": digest_of(plain),
            "schedulers": digest_of(plain_leaves([obj.state_dict() for obj in self._stateful if steers(obj)])),
            "elastic.state() and random generators": digest_of(
                [
                    obj.plain() if isinstance(obj, Drawing) else plain_leaves(obj.state_dict())
                    for obj in self._stateful
                    if isinstance(obj, State | Drawing)
                ]
            ),
        }
        self._forget_turn()
        return {**found, **self.digests()} if weights else found

    def digests(self) -> dict[str, float]:
        return {
            "parameters": digest_of_tensors(self._gradients.parameters),
            "buffers": digest_of_tensors(self._buffers()),
        }

    def take_over(self, backend: CollectiveBackend) -> float:
        weights = [*self._gradients.parameters, *self._buffers()]
        before = [tensor.detach().clone() for tensor in weights]
        self.broadcast(backend)
        return distance_between(before, [tensor.detach() for tensor in weights])

    def _buffers(self) -> list[torch.Tensor]:
        """Those that a module saves; the others are no state."""
        found = []
        for module in (obj for obj in self._stateful if isinstance(obj, torch.nn.Module)):
            saved = module.state_dict(keep_vars=True)
            found += [buffer for name, buffer in module.named_buffers() if name in saved]
        return found

    def _forget_turn(self, restart: bool = False) -> None:
        self._steps = 0
        self._steering.next_turn(restart)
        for loader in self._loaders:
            loader.read = 0

    def _step_taken(self, *_: Any) -> None:
        self._steps += 1
        self._group.common.stepped()
        self._group.batches.kept.stepped()

    def set_width(self, width: int) -> None:
        self._forget_turn(restart=True)
        self._statistics.enable(width > 1)
        self._gradients.restart(width > 1)
        group = self._group
        own = seed_of(group.trial, group.turn_number, group.generation, group.backend.rank) if width > 1 else 0
        self._dropout.enable(width > 1, own)

    def capture(self) -> dict[str, Any]:
        view = self._view()
        state: dict[str, Any] = copied(view, self._leaves.packer())
        state["on_device"] = [on_devices(part) for part in view["stateful"]]
        state["streams"] = capture_streams(self._gpu)
        return state

    def load(self, state: dict[str, Any], *, with_streams: bool) -> None:
        view = self._view()
        have, want = _counts(view), _counts(state)
        if have != want:
            raise ValueError(
                f"this state is of other objects than elastic.prepare() got: it has {want}, the loop {have}; "
                "prepare the same objects in the same order in every worker and every run of a trial"
            )
        on_device = state.get("on_device")  # a commit's tensors are on the CPU; None: from before 2026-11-28
        stateful = self._leaves.unpacked(state["stateful"], like=view["stateful"])
        for number, (obj, part) in enumerate(zip(self._stateful, stateful, strict=True)):
            # torch's own put what they load where their tensors are.
            if on_device is not None and not isinstance(obj, torch.nn.Module | torch.optim.Optimizer):
                if isinstance(obj, State):  # it keeps what it loads, and a commit may be loaded twice
                    part = copied(part, lambda leaf: leaf)
                part = put_back(part, on_device[number], self._device)
            obj.load_state_dict(part)
            if isinstance(obj, torch.optim.Optimizer):
                _keep_types(obj, part)
        with torch.no_grad():
            for parameter, value in zip(self._loose, state["loose"], strict=True):
                parameter.copy_(value)
        self._gradients.load(state["parameters"])
        for generators, parts in zip(self._generators(), state["generators"], strict=True):
            for generator, part in zip(generators, parts, strict=True):
                generator.set_state(part)
        for loader, begun in zip(self._loaders, state["begun"], strict=True):
            loader.begun = begun
        if with_streams:
            restore_streams(state["streams"], self._gpu)

    def broadcast(self, backend: CollectiveBackend) -> None:
        if backend.rank == 0:
            view = self._view()
            broadcast_tree({**view, "stateful": self._leaves.packed(view["stateful"])}, backend)
        else:
            self.load(broadcast_tree(None, backend), with_streams=False)

    def _view(self) -> dict[str, Any]:
        return {
            "stateful": [obj.state_dict() for obj in self._stateful],
            "loose": list(self._loose),
            "parameters": self._gradients.view(),
            "generators": [[generator.get_state() for generator in found] for found in self._generators()],
            "begun": [loader.begun for loader in self._loaders],
        }

    def _generators(self) -> list[list[torch.Generator]]:
        return [generators_of(loader) for loader in self._loaders]


def _keep_types(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Give the optimizer's state the types that it had in the optimizer that it is from.

    torch's `load_state_dict` casts it to the type of its parameter: a follower would round NAdam's ``mu_product``, a
    float32, in another way than its leader.
    """
    numbers = [number for group in loaded["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for name, value in loaded.get("state", {}).get(number, {}).items():
            now = state.get(name)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                state[name] = value.detach().to(now.device, copy=True)


def steers(obj: Any) -> bool:
    """Whether it steers the training: a learning-rate scheduler or a gradient scaler."""
    return isinstance(obj, torch.optim.lr_scheduler.LRScheduler) or callable(getattr(obj, "unscale_", None))


def _counts(state: dict[str, Any]) -> dict[str, Any]:
    """The number of objects of each kind in a state, for the error when a state does not fit."""
    counts: dict[str, Any] = {name: len(state[name]) for name in ("stateful", "loose")}
    return {**counts, "generators": [len(found) for found in state["generators"]]}

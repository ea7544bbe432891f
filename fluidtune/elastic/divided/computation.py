"""A module computed in this process on a call or a part of one: what it returns, and its graph until the backward.

The leader computes its own part so, and those of followers that are gone; a follower what it is asked for.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from ..random_streams import capture_streams
from .batch_statistics import Gather, WholeStatistics
from .parts import Rule
from .torch_private import computed
from .trees import Tree, tree_of
from .whole_draws import WholeDraws

Modes = Callable[[], AbstractContextManager[Any]]


class Streams:
    """The random streams of torch that a forward draws from. ``device``: a GPU, if the module is on one.

    ``states``: those to take in place of what they are now.
    """

    def __init__(self, device: torch.device | None, states: Sequence[torch.Tensor] | None = None) -> None:
        self.device = device
        self.states = [torch.get_rng_state()] if states is None else list(states)
        if states is None and device is not None:
            self.states.append(torch.get_device_module(device).get_rng_state(device))

    def restore(self) -> None:
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            assert self.device is not None
            torch.get_device_module(self.device).set_rng_state(self.states[1], self.device)

    @property
    def digest(self) -> bytes:
        return hashlib.sha1(b"".join(state.numpy().tobytes() for state in self.states)).digest()


def other_streams() -> bytes:
    """The states of the random numbers of Python and NumPy: the pickle of what `restore_streams` takes."""
    return pickle.dumps({name: state for name, state in capture_streams().items() if name in ("python", "numpy")})


class Computation:
    """``module`` called with ``given``. ``needs``: numbers of its tensors that get gradients, ``trained``: those of the
    module that do. ``modes``: what it is computed under. It draws from the random streams as they are.
    """

    def __init__(
        self, module: nn.Module, trained: Sequence[torch.Tensor], given: Tree, needs: Sequence[int], modes: Modes
    ) -> None:
        tensors = list(given.tensors)
        for i in needs:
            tensors[i] = tensors[i].detach().requires_grad_()
        args, kwargs = given.value(tensors)
        with modes():
            result = computed(module, args, kwargs)
        self.output = tree_of(result, "its output", given.classes)
        self._wanted = [*(tensors[i] for i in needs), *trained]

    @property
    def requires(self) -> list[bool]:
        """Which tensors of the output have a gradient."""
        return [tensor.requires_grad for tensor in self.output.tensors]

    def gradients(
        self, grads: Sequence[torch.Tensor | None], modes: Modes, keep: bool = False
    ) -> list[torch.Tensor | None]:
        """Of the inputs that get one, then of the trained tensors. ``grads``: of the output; ``keep``: the graph."""
        with modes():
            return gradients_of(self.output.tensors, grads, self._wanted, retain_graph=keep)


def gradients_of(
    ends: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor], **more: bool
) -> list[torch.Tensor | None]:
    """As `torch.autograd.grad`, of the ends that have a gradient."""
    pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None and end.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    outputs, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, wanted, given, allow_unused=True, **more))


#: Where a part is in its batch: samples of the batch, the part's first one, its own, their dimension.
Cut = tuple[int, int, int, int]


def cut_of(rule: Rule, sizes: Sequence[int], part: int) -> Cut:
    return sum(sizes), sum(sizes[:part]), sizes[part], rule.dim


def part_modes(draws: bool, statistics: bool, cut: Cut, gather: Gather) -> Modes:
    """What a part is computed under. ``draws``, ``statistics``: see `Rule`."""

    def modes() -> AbstractContextManager[Any]:
        stack = ExitStack()
        if statistics:
            stack.enter_context(WholeStatistics(gather))
        if draws:
            stack.enter_context(WholeDraws(*cut))
        return stack

    return modes

"""What `torch_private` relies on in torch."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fluidtune.elastic.divided import torch_private


def test_an_answer_is_in_no_copy() -> None:
    module = nn.Linear(2, 2)
    torch_private.have_answer(module, lambda x: "answer")
    assert module(torch.zeros(1, 2)) == "answer"
    assert torch.is_tensor(torch_private.computed(module, (torch.zeros(1, 2),), {}))
    for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert torch_private.answering(other) is None
    torch_private.have_answer(module, None)
    assert torch.is_tensor(module(torch.zeros(1, 2)))


def test_the_arguments_of_an_operation() -> None:
    names, tensors = torch_private.arguments_of(torch.ops.aten.bernoulli_.Tensor)
    assert names == ["self", "p", "generator"] and tensors == ["self", "p"]


def test_calls_by_modules() -> None:
    seen = []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.append((type(module).__name__, torch_private.is_amid_call()))
    )
    nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())(torch.zeros(1, 2))
    handle.remove()
    assert seen == [("Sequential", False), ("Sequential", True), ("Linear", True), ("ReLU", True)]


def test_what_is_under_way() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 1

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            seen.append(torch_private.keeps_graph())
            return grad

    x = torch.ones(1, requires_grad=True)
    out = Look.apply(x)
    out.backward(retain_graph=True)
    out.backward()
    assert seen == [True, False]

    def looked(x: torch.Tensor) -> torch.Tensor:
        seen.append(
            (torch_private.replaces_saved_tensors(), torch_private.transforms(), torch_private.dispatch_modes())
        )
        return x * 2

    seen.clear()
    looked(x)
    checkpoint(looked, x, use_reentrant=False)
    torch.func.vmap(looked)(x)
    with FlopCounterMode(display=False):
        looked(x)
    assert [tuple(map(bool, each)) for each in seen] == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    before = torch_private.version(x)
    with torch.no_grad():
        x.add_(1)
    assert torch_private.version(x) == before + 1
    assert [len(hooks) for hooks in torch_private.HOOKS_FOR_ALL] == [0, 0, 0, 0]
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert [len(hooks) for hooks in torch_private.HOOKS_FOR_ALL] == [0, 1, 0, 0]
    handle.remove()

"""The copy of a tensor is as it was: type, shape, order in memory, and what it shares with others."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.elastic.data.plain_state import State
from fluidtune.elastic.data.snapshot import restored, taken
from fluidtune.elastic.data.trial_state import TrialState
from tests.elastic.restarts import same


def copy_of(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(taken(state, [], pickle), file)
    file.seek(0)
    return restored(torch.load(file, weights_only=False), [], pickle, torch.device("cpu"))


def tensors() -> dict[str, torch.Tensor]:
    """By kind, a tensor of it."""
    image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    return {
        "contiguous": image,
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": torch.rand(3, 4).t(),
        "a slice with gaps": torch.rand(6, 8)[::2, 1::3],
        "expanded": torch.rand(3, 1).expand(3, 4),
        "a number": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.rand(7).bfloat16(),
        "bool": torch.rand(5) > 0.5,
        "complex": torch.rand(3, dtype=torch.complex128),
        "conjugate": torch.rand(2, 3, dtype=torch.complex64).conj().t(),
        "learns": torch.rand(3, requires_grad=True),
        "coo": torch.sparse_coo_tensor([[0, 0, 1], [2, 2, 0]], [1.0, 2.0, 3.0], (2, 3)),
        "csr": torch.eye(3).to_sparse_csr(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    }


@pytest.mark.parametrize("kind", tensors())
def test_the_copy_of_a_tensor_is_as_it_was(kind: str) -> None:
    # Seen: a `channels_last` network with `AdamW(fused=True)` that grew was trained to other weights, silently.
    was = tensors()[kind]
    found = copy_of({"x": [was, 3]})["x"][0]
    assert (found.dtype, found.shape, found.layout) == (was.dtype, was.shape, was.layout)
    assert found.requires_grad == was.requires_grad
    if was.layout == torch.strided:
        assert found.stride() in (was.stride(), torch.empty_like(was).stride())
        assert torch.equal(found.detach().to(torch.complex128), was.detach().to(torch.complex128))
    else:
        assert torch.equal(found.to_dense(), was.to_dense())
    assert found.layout != torch.strided or not found.numel() or found.data_ptr() != was.data_ptr()


def test_only_what_does_not_place_itself_is_copied_to_the_gpu() -> None:
    """No GPU is needed: "meta" stands for one. Seen: a restart held two more copies of the model on the GPU."""
    model, own = torch.nn.Linear(2, 2), State(rates=torch.ones(2), teacher=torch.nn.Linear(2, 2), early=torch.ones(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = TrialState(torch.device("meta"))
    state.add((model, optimizer, own))
    was, kept = copy.deepcopy(state.now()), state.capture()
    kept = replace(kept, on_gpu=[True] * (len(kept.on_gpu) - 1))
    state.load(kept)
    placed = [own.rates, own.teacher.weight, optimizer.param_groups[0]["lr"]]
    assert [each.device.type for each in placed] == ["meta"] * 3 and own.early.device.type == "cpu"
    assert isinstance(placed[1], torch.nn.Parameter) and placed[1].is_leaf
    assert same(state.readable(kept)["stateful"][:2], was["stateful"][:2])
    state.close()


def test_two_small_views_of_something_large_do_not_bring_it_along() -> None:
    large = torch.zeros(1 << 22)
    found = copy_of([large[:2], large[-2:]])
    assert [each.untyped_storage().nbytes() for each in found] == [8, 8]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_views_of_any_buffers(data: st.DataObject) -> None:
    kinds = [torch.float32, torch.float64, torch.int16, torch.uint8]
    buffers = [
        torch.randint(0, 100, (64,)).to(kind) for kind in data.draw(st.lists(st.sampled_from(kinds), min_size=1))
    ]
    views = list(buffers) if data.draw(st.booleans()) else [buffers[0][:2]]
    for _ in range(data.draw(st.integers(0, 8))):
        buffer = data.draw(st.sampled_from(buffers))
        begin = data.draw(st.integers(0, 7))
        step = data.draw(st.integers(1, 7))
        views.append(buffer.view(data.draw(st.sampled_from(kinds)))[begin::step])
    found = copy_of(list(views))
    for view, other in zip(views, found, strict=True):
        assert torch.equal(view, other) and view.dtype == other.dtype
    found[0].zero_()
    views[0].zero_()
    alike = [pair for pair in zip(views, found, strict=True) if pair[0].dtype == views[0].dtype]
    assert all(torch.equal(view, other) for view, other in alike)

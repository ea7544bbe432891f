"""A model that is divided itself is known by its modules and parameters, as PyTorch makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

from fluidtune.integrations.sharded_models import sharded_because


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of PyTorch's that has this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def fsdp() -> nn.Module:
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"))


def fsdp2() -> nn.Module:
    whole = model()
    fully_shard(whole[0], mesh=init_device_mesh("cpu", (1,)))
    return whole


def tensor_parallel() -> nn.Module:
    return distribute_module(model(), init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (fsdp, "FullyShardedDataParallel divides the model itself"),
        (fsdp2, "FSDPLinear divides the model itself"),
        (tensor_parallel, "parameter 0.weight is a distributed tensor"),
    ],
)
def test_a_model_that_is_divided_keeps_one_worker(one_process: None, make: Any, why: str) -> None:
    assert why in str(sharded_because(make()))


def test_a_model_in_one_piece_does_not() -> None:
    assert sharded_because(model()) is None

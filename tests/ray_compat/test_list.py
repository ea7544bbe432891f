"""The list in `fluidtune.ray_compat`: each entry exists in this Ray, is used, and nothing else is used."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fluidtune import ray_compat
from tests.ray_compat.inspecting import attributes_of
from tools import ray_boundary

SOURCES = {path.name: path.read_text() for path in Path(ray_compat.__file__).parent.glob("*.py")}
#: Names that the oldest Ray has not. tests/ray_compat/test_cluster_address.py uses them on the newest.
NEWER = {"ensure_token_if_auth_enabled", "maybe_enable_token_auth_if_token_available"}


def owners() -> dict[str, set[Any]]:
    """By name, the modules and classes of it that are there when all is imported that our modules import of Ray."""
    for name in {name for text in SOURCES.values() for name in re.findall(r"(?:from|import) (ray\.[\w.]+)", text)}:
        if not name.startswith("ray._private.authentication"):
            importlib.import_module(name)
    found: dict[str, set[Any]] = defaultdict(set)
    for path, module in list(sys.modules.items()):
        if path.startswith("ray."):
            classes = {value for value in vars(module).values() if isinstance(value, type)}
            for name, value in ((path.rpartition(".")[2], module), *((each.__name__, each) for each in classes)):
                found[name].add(value)
    return found


def listed() -> list[str]:
    """Every name in the heads of the list's entries: ``- ``A._x``, ``B._y``: why``."""
    heads = re.findall(r"^- ((?:``[^`]+``,?\s+)*``[^`]+``):", ray_compat.__doc__ or "", re.MULTILINE)
    return [name for head in heads for name in re.findall(r"``([^`]+)``", head)]


LISTED = listed()
OWNERS = owners()


def test_every_line_of_the_list_is_read() -> None:
    assert len(re.findall(r"^- ", ray_compat.__doc__ or "", re.MULTILINE)) > 25
    assert all(
        any(f"``{name}``" in line for name in LISTED)
        for line in (ray_compat.__doc__ or "").splitlines()
        if line.startswith("- ")
    )
    assert len(LISTED) == len(set(LISTED))


@pytest.mark.parametrize("entry", LISTED)
def test_an_entry_exists_in_this_ray(entry: str) -> None:
    owner, _, name = entry.rpartition(".")
    if entry.startswith("ray."):
        assert importlib.import_module(entry)
    elif not owner:
        assert name in NEWER or any(hasattr(each, name) for each in set().union(*OWNERS.values()))
    else:
        # Ray's function `connect` gives its Worker attributes from outside the class.
        outside = owner == "Worker" and f"    worker.{name} = " in inspect.getsource(sys.modules["ray._private.worker"])
        found = any(hasattr(each, name) for each in OWNERS[owner])
        assert outside or found or any(name in attributes_of(each) for each in OWNERS[owner] if isinstance(each, type))


@pytest.mark.parametrize("entry", LISTED)
def test_an_entry_is_used(entry: str) -> None:
    name = entry if entry.startswith("ray.") else entry.rpartition(".")[2]
    code = "\n".join(text for file, text in SOURCES.items() if file != "__init__.py")
    assert re.search(rf"\b{re.escape(name)}\b", code)


def test_nothing_is_used_that_is_not_listed() -> None:
    names = {entry.rpartition(".")[2] for entry in LISTED}
    used = {
        found.name: f"{file}:{found.line}"
        for file, text in SOURCES.items()
        for found in ray_boundary.accesses(text, defined_elsewhere=frozenset())
    }
    lacking = {name: where for name, where in used.items() if name.rpartition(".")[2] not in names}
    # Classes and modules that hold what is listed.
    assert set(lacking) == {
        "ray._private.authentication.authentication_token_setup",
        "ray._private.parameter.RayParams",
        "ray.core.generated.gcs_pb2.ActorTableData",
        "ray.core.generated.gcs_pb2.PlacementGroupTableData",
        "ray.train._internal.checkpoint_manager",
        "ray.tune.execution.tune_controller.TuneController",
        "ray.remote_function.RemoteFunction",
        "ray.train.v2._internal.execution.callback.WorkerGroupCallback",
        "ray.train.v2._internal.execution.controller.controller.TrainController",
        "ray.train.v2._internal.execution.worker_group.worker_group",
        "ray.tune.trainable.trainable",
    }

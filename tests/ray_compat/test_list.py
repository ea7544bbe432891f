"""The list in `fluidtune.ray_compat`: each entry exists in this Ray, is used, and nothing else is used."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from ray import _raylet
from ray._private import services, state, worker
from ray._private.parameter import RayParams
from ray._raylet import CoreWorker, GlobalStateAccessor
from ray.actor import ActorClass, ActorHandle
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.air.execution._internal.tracked_actor import TrackedActor
from ray.autoscaler.v2 import sdk
from ray.core.generated import core_worker_pb2, gcs_pb2
from ray.remote_function import RemoteFunction
from ray.train._internal import checkpoint_manager, session
from ray.train._internal.storage import StorageContext, _FilesystemSyncer, get_fs_and_path
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.worker_group import worker_group
from ray.train.v2.api.config import ScalingConfig
from ray.tune import ExperimentAnalysis, Trainable, Tuner, registry, result
from ray.tune.execution import class_cache, experiment_state
from ray.tune.execution.tune_controller import TrialRunnerWrapper, TuneController
from ray.tune.experiment import Trial
from ray.tune.impl import placeholder
from ray.tune.impl.tuner_internal import TunerInternal
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    async_hyperband,
)
from ray.tune.schedulers.hyperband import _Bracket
from ray.tune.search import BasicVariantGenerator, SearchGenerator
from ray.tune.stopper import CombinedStopper, MaximumIterationStopper
from ray.tune.trainable import FunctionTrainable, trainable
from ray.tune.utils import flatten_dict, serialization

from fluidtune import ray_compat
from tests.ray_compat.inspecting import attributes_of
from tools import ray_boundary

CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        ActorClass,
        ActorHandle,
        AsyncHyperBandScheduler,
        BasicVariantGenerator,
        CombinedStopper,
        CoreWorker,
        ExperimentAnalysis,
        FunctionTrainable,
        HyperBandScheduler,
        MaximumIterationStopper,
        MedianStoppingRule,
        PopulationBasedTraining,
        RayActorManager,
        RayParams,
        RemoteFunction,
        ScalingConfig,
        SearchGenerator,
        StorageContext,
        Thread,
        TrackedActor,
        TrainController,
        Trainable,
        Trial,
        TrialRunnerWrapper,
        TuneController,
        Tuner,
        TunerInternal,
        WorkerGroupCallback,
        worker.Worker,
        _Bracket,
        registry._ParameterRegistry,
        session._TrainSession,
        _FilesystemSyncer,
    )
}
MODULES: dict[str, Any] = {
    "AsyncBracket": async_hyperband._Bracket(1, 2, 2, 0),
    "ActorTableData": gcs_pb2.ActorTableData,
    "PlacementGroupTableData": gcs_pb2.PlacementGroupTableData,
    "class_cache": class_cache,
    "core_worker_pb2": core_worker_pb2,
    "registry": registry,
    "result": result,
    "serialization": serialization,
    "state": state.state,
    "trainable": trainable,
    "worker": worker,
    "worker_group": worker_group,
}
NAMES: dict[str, Any] = {
    "GcsClient": _raylet.GcsClient,
    "GlobalStateAccessor": GlobalStateAccessor,
    "StorageContext": StorageContext,
    "TrackedActor": TrackedActor,
    "_FilesystemSyncer": _FilesystemSyncer,
    "_find_newest_experiment_checkpoint": experiment_state._find_newest_experiment_checkpoint,
    "create_resolvers_map": placeholder.create_resolvers_map,
    "get_fs_and_path": get_fs_and_path,
    "inject_placeholders": placeholder.inject_placeholders,
    "_TrainingResult": checkpoint_manager._TrainingResult,
    "_FutureTrainingResult": session._FutureTrainingResult,
    "canonicalize_bootstrap_address": services.canonicalize_bootstrap_address,
    "flatten_dict": flatten_dict,
    "get_cluster_resource_state": sdk.get_cluster_resource_state,
    "get_session": session.get_session,
    "maybe_enable_token_auth_if_token_available": None,  # tests/ray_compat/test_cluster_address.py, on the newest Ray
}


def listed() -> list[str]:
    """Every name in the heads of the list's entries: ``- ``A._x``, ``B._y``: why``."""
    heads = re.findall(r"^- ((?:``[^`]+``,?\s+)*``[^`]+``):", ray_compat.__doc__ or "", re.MULTILINE)
    return [name for head in heads for name in re.findall(r"``([^`]+)``", head)]


LISTED = listed()
SOURCES = {path.name: path.read_text() for path in Path(ray_compat.__file__).parent.glob("*.py")}


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
    elif owner in CLASSES:
        cls = CLASSES[owner]
        # Ray's function `connect` gives its Worker attributes from outside the class.
        from_outside = cls is worker.Worker and f"    worker.{name} = " in inspect.getsource(worker)
        assert from_outside or name in attributes_of(cls)
    elif owner in MODULES:
        assert hasattr(MODULES[owner], name)
    else:
        assert entry in NAMES


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
        "ray._private.services",
        "ray.core.generated.gcs_pb2.ActorTableData",
        "ray.core.generated.gcs_pb2.PlacementGroupTableData",
        "ray.tune.execution.tune_controller.TuneController",
        "ray.remote_function.RemoteFunction",
        "ray.train.v2._internal.execution.callback.WorkerGroupCallback",
        "ray.train.v2._internal.execution.controller.controller.TrainController",
        "ray.train.v2._internal.execution.worker_group.worker_group",
        "ray.tune.trainable.trainable",
    }

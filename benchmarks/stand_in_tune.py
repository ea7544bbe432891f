"""A manager and its job, both real, where Tune's controller, the devices and the worker processes are stand-ins.

For `driver_passes`, and for the tests of the manager. No Ray runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fluidtune import FluidExecutor
from fluidtune.cluster.devices.layout import Layout
from fluidtune.tune import result_logs, snapshots, tuning_job
from fluidtune.tune.device_setup import DeviceSetup
from fluidtune.tune.groups import Membership
from fluidtune.tune.manager import FluidActorManager
from fluidtune.tune.tuning_job import TuningJob


def layout(count: int) -> Layout:
    """So many devices, each a GPU that one trial fills."""
    return Layout("gpu", count, {"GPU": 1.0}, 1.0, 1, {"GPU": 1.0})


@contextmanager
def standing_alone(
    directory: Path,
    devices: Any,
    pool: Callable[..., Any],
    take_over: Callable[[Any, int], None] = lambda trial, up_to: None,
    setup: DeviceSetup | None = None,
) -> Iterator[FluidActorManager]:
    """A manager whose run is kept in ``directory``.

    ``devices``: stands in for a `DeviceSource`. ``pool``: makes the stand-in for the job's `WorkerPool`.
    ``take_over``: is told a trial whose log files would be made whole, and up to which iteration. ``setup``: how the
    devices are shared; None: each is a GPU that one trial fills.
    """
    setup = setup or DeviceSetup("job", layout(len(devices.nodes)), 1, 1, None, None, None, None)
    controller = SimpleNamespace(
        search_alg=None,
        _storage=SimpleNamespace(experiment_dir_name="run", syncer=SimpleNamespace(wait=lambda: None)),
        _max_pending_trials=1,
        _reuse_actors=None,
        _iteration=0,
        get_trials=lambda: [],
        _pending_trials=[],
        _cached_trial_decisions={},
        update_max_pending_trials=lambda count=None: None,
        checkpoint=lambda force: None,
    )
    scheduler = SimpleNamespace(
        executor=FluidExecutor(),
        adapter=SimpleNamespace(synchronous=True, waits_for_checkpoints=False, no_keep=""),
        base_scheduler=None,
        metric="score",
        mode="max",
        membership=lambda trial: Membership("g", True, 10.0),
    )
    folder = SimpleNamespace(
        path=directory,
        lock=SimpleNamespace(close=lambda: None),
        **dict.fromkeys(("begin", "close"), lambda: None),
    )
    with ExitStack() as stack:
        for target, name, stand_in in (
            (tuning_job, "set_up_devices", lambda *args, **named: setup),
            (tuning_job, "hold_devices", lambda *args, **named: devices),
            (tuning_job, "NewProcesses", lambda *asked: None),
            (tuning_job, "WorkerPool", pool),
            (tuning_job, "ExperimentFolder", lambda storage, restored: folder),
            (snapshots, "store_whole_files", lambda *asked: None),
            (result_logs, "take_over", take_over),
        ):
            stack.enter_context(patch.object(target, name, stand_in))
        stack.enter_context(patch("ray.put", lambda value: value))
        context = SimpleNamespace(runtime_env={}, get_node_id=lambda: "here", get_job_id=lambda: "job")
        stack.enter_context(patch("ray.get_runtime_context", lambda: context))
        job = TuningJob(controller, scheduler, {"GPU": 1.0}, folder)
        stack.callback(job.log.close)
        yield FluidActorManager(job)

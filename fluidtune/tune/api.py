"""`fluidtune.run` and `fluidtune.Tuner`: Ray Tune's own entry points, with one more parameter, ``executor``.

Both call Ray's with a `FluidScheduler`, which carries the executor. Settings and trainable are checked here, before a
process is started.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import ray
from ray import cloudpickle
from ray.tune import RunConfig, TuneConfig
from ray.tune.experiment import Experiment

from fluidtune.cluster.devices.layout import DeviceSpec, layout
from fluidtune.cluster.forks.nodes import while_ray_starts
from fluidtune.cluster.new_processes import worker_environment
from fluidtune.device_kinds import KINDS
from fluidtune.driver_lock import hold
from fluidtune.errors import FluidTuneError, UnpicklableTrainableError
from fluidtune.memory_trim import one_heap
from fluidtune.ray_compat.cluster_address import refuse_unjoinable
from fluidtune.ray_compat.entry_points import RAY_RUN, RAY_TUNER, folder_of, run_config, tune_config
from fluidtune.tune import extension
from fluidtune.tune.executor import FluidExecutor
from fluidtune.tune.kept_trainable import kept, kept_in
from fluidtune.tune.scheduler import FluidScheduler

#: The executor that `fluidtune run` was given, for calls that name none.
of_the_command: FluidExecutor | None = None
#: The names of what was called in this process.
called: list[str] = []


def run(run_or_experiment: Any, *, executor: FluidExecutor | None = None, **kwargs: Any) -> Any:
    """``ray.tune.run`` under FluidTune.

    Args:
        run_or_experiment: as in ``ray.tune.run``. All other parameters and the returned value are Ray's, too.
        executor: the execution settings; None: the defaults.

    Raises:
        FluidTuneError: this cluster cannot satisfy the settings, the trainable cannot be sent to a worker, or the run
            has another driver.
    """
    called.append("ray.tune.run")
    if callable(run_or_experiment):
        _check_picklable(run_or_experiment)
    kwargs["scheduler"] = scheduler = _wrapped(kwargs.get("scheduler"), executor)
    with _held(RunConfig(**{each: kwargs.get(each) for each in ("name", "storage_path", "storage_filesystem")})):
        _ready(scheduler.executor)
        return RAY_RUN(run_or_experiment, **kwargs)


class Tuner(RAY_TUNER):  # type: ignore[valid-type, misc]
    """``ray.tune.Tuner`` under FluidTune: its parameters, plus ``executor``."""

    def __init__(
        self,
        trainable: Any = None,
        *,
        executor: FluidExecutor | None = None,
        tune_config: TuneConfig | None = None,
        **kwargs: Any,
    ):
        if callable(trainable):
            _check_picklable(trainable)
        tune_config = tune_config or TuneConfig()
        scheduler = _wrapped(tune_config.scheduler, executor)
        scheduler.kept = kept(trainable, kwargs.get("param_space"))
        tune_config = dataclasses.replace(tune_config, scheduler=scheduler)
        lock = _held(kwargs.get("run_config"))  # Ray writes into the run's folder now
        try:
            super().__init__(trainable, tune_config=tune_config, **kwargs)
        finally:
            del lock

    @classmethod
    def restore(cls, path: str, trainable: Any, *, executor: FluidExecutor | None = None, **kwargs: Any) -> Any:
        """``ray.tune.Tuner.restore``. The executor is the saved one unless ``executor`` is given.

        An experiment that stock Ray Tune began can be restored, too. Over Ray Client it then runs as under stock.

        Raises:
            FluidTuneError: another executor is given over Ray Client.
        """
        executor = executor or of_the_command
        stock = RAY_TUNER.restore(path, trainable, **kwargs)
        tuner = cls.__new__(cls)
        tuner.__dict__.update(stock.__dict__)
        config = tune_config(tuner)
        if config is not None:
            config.scheduler = _wrapped(config.scheduler, executor)
        elif executor is not None:
            raise FluidTuneError(
                f"executor={executor!r}: over Ray Client a restored run keeps its executor; leave it out, or restore "
                "in a process on the cluster"
            )
        return tuner

    @classmethod
    def extend(
        cls,
        path: str,
        trainable: Any = None,
        *,
        num_samples: int | None = None,
        until: Mapping[str, float] | None = None,
        param_space: Mapping[str, Any] | None = None,
        resume_errored: bool = False,
        storage_filesystem: Any = None,
        executor: FluidExecutor | None = None,
    ) -> Any:
        """A Tuner whose ``fit`` goes on with a run that has ended, by the search and the scheduler as they stand.

        Finished trials are kept, and trials that have not ended go on as with `restore`.

        Args:
            path: the run's directory, or its URI.
            trainable: as in `restore`; None: the one that the run's folder keeps.
            num_samples: the number of further samples. One sample of a grid is the whole grid.
            until: the new limit of an attribute of results, such as ``{"training_iteration": 200}``: larger than that
                of the run's stop criterion or ASHA's ``max_t``. Trials that came to the old one, and have a
                checkpoint, train on.
            param_space: the search space of the further samples; None: that of before. A searcher is told of the
                trials that lie within a new one, as far as it can be. The scheduler compares with all.
            resume_errored: True: trials that have failed go on, too. False: they stay as they are.
            storage_filesystem: as in `restore`.
            executor: the execution settings; None: the run's.

        Raises:
            FluidTuneError: there is no such run, another driver carries it on, another version kept what its algorithm
                knows, or it cannot go on with this.
        """
        where = path if "://" in path else os.path.abspath(os.path.expanduser(path))
        name = extension.trials_in(where, storage_filesystem)[0].trainable_name
        script, space = "", param_space
        if trainable is None:
            script, trainable, space = kept_in(where, storage_filesystem)
            space = param_space or space
        if (given := Experiment.get_trainable_name(trainable)) != name:
            raise FluidTuneError(f"trainable={given}: the run's trials run {name}; give that one, or leave it out")
        given_to_ray = {"param_space": space, "storage_filesystem": storage_filesystem}
        tuner = cls.restore(where, trainable, executor=executor, resume_errored=resume_errored, **given_to_ray)
        config = tune_config(tuner)
        if config is None:
            raise FluidTuneError(f"{path} cannot be continued over Ray Client; do it in a process on the cluster")
        tuner.lock = _held(run_config(tuner))  # until `fit` is over: what is decided here holds until then
        #: Of the command: where the kept trainable comes from.
        tuner.script = script
        try:
            config.scheduler.extension = extension.extension_of(
                where, storage_filesystem, config, num_samples, until or {}, param_space
            )
        except FluidTuneError:
            tuner.lock = None
            raise
        return tuner

    def fit(self) -> Any:
        called.append("ray.tune.Tuner")
        config = tune_config(self)
        with _held(run_config(self)):
            if config is not None:  # over Ray Client the cluster itself checks the settings
                _ready(config.scheduler.executor)
            return super().fit()


def _held(config: Any) -> AbstractContextManager[Any]:
    """The lock of the run with this `RunConfig`, none if it has no local folder so far. Raises as `hold`."""
    folder = folder_of(config)
    return nullcontext() if folder is None else closing(hold(folder))


def _wrapped(scheduler: Any, executor: FluidExecutor | None) -> FluidScheduler:
    executor = FluidExecutor.checked(executor) or of_the_command
    if isinstance(scheduler, FluidScheduler):
        if executor is not None:
            scheduler.executor = executor
        return scheduler
    return FluidScheduler(scheduler, executor)


def ray_starts(executor: FluidExecutor, runtime_env: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Have the processes of trials prepared while this process begins to use Ray inside. ``runtime_env``: the job's."""
    spec = DeviceSpec.parse(executor.devices)
    forks = executor.fork_server and (spec is None or KINDS[spec.kind].computes)
    return while_ray_starts(runtime_env, worker_environment()) if forks else nullcontext()


def _ready(executor: FluidExecutor) -> None:
    """Start Ray as Tune would, and refuse settings that this cluster cannot satisfy."""
    if not ray.is_initialized():
        if os.environ.get("TUNE_DISABLE_AUTO_INIT") == "1":  # Tune starts none then, and says so
            return
        one_heap()
        refuse_unjoinable()
        with ray_starts(executor, {}):
            ray.init()
    spec = DeviceSpec.parse(executor.devices)
    if spec is not None and not executor.on_demand:
        there = layout(spec, {}, ray.cluster_resources(), max_packing=1).most
        if executor.max_workers and there is not None and executor.max_workers > there:
            raise FluidTuneError(
                f"max_workers={executor.max_workers} is more than the {there} devices that "
                f"devices={executor.devices!r} means here; use at most {there}, or leave it out"
            )


def _check_picklable(trainable: Any) -> None:
    name = getattr(trainable, "__name__", repr(trainable))
    try:
        cloudpickle.dumps(trainable)
    except Exception as error:
        culprit = _culprit(trainable)
        raise UnpicklableTrainableError(
            f"the trainable {name} cannot be sent to a worker: {error}"
            + (f" (it uses {culprit} from outside itself)" if culprit else "")
            + "; create such objects inside the trainable, or pass data with tune.with_parameters"
        ) from None


def _culprit(trainable: Any) -> str | None:
    """Return the name of a global or closure variable of the function that cannot be pickled; None: there is none."""
    if not (inspect.isfunction(trainable) or inspect.ismethod(trainable)):
        return None
    used = inspect.getclosurevars(trainable)
    for name, value in {**used.nonlocals, **used.globals}.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{name!r} ({type(value).__name__})"
    return None

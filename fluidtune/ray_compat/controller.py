"""Tune's controller: what is read of it and changed in it, and the class that takes the place of its actor manager."""

from __future__ import annotations

import abc
import os
import uuid
from collections import ChainMap, Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ray.air.execution._internal.tracked_actor import TrackedActor
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.utils import flatten_dict, serialization

from fluidtune.ray_compat.trainable import TRAINING_ITERATION, TRIAL_INFO, TrainingResult


def controller_behind(handed: Any) -> TuneController:
    """Return the controller behind what Tune hands to a scheduler: the controller itself, or a wrapper of it."""
    return getattr(handed, "_tune_controller", handed)


def asked_reuse(controller: TuneController) -> bool:
    """Return the script's ``reuse_actors``. Asked before `replace_actor_manager`."""
    return bool(controller._reuse_actors)


def was_restored(controller: TuneController) -> bool:
    """Whether the run goes on from what Tune has saved of an earlier driver. Asked when the first trial is added.

    Tune adds saved trials before it says ``resumed``. They have their directories, which new ones get when they start.
    Errored trials that are begun anew are new ones, but the controller has its number of turns by then.
    """
    return bool(controller._iteration) or any(trial.relative_logdir for trial in controller.get_trials())


#: Under these names Tune saves what a restored run must know besides its trials: what the first trial has asked for,
#: the last driver's `PYTHONHASHSEED`, and what `extend_controller` is given as ``search``.
REQUEST, HASH_SEED, SEARCH = "_fluidtune_request", "_fluidtune_hash_seed", "_fluidtune_search"


def saved_with_run(controller: TuneController) -> dict[str, Any]:
    """Return the controller's attributes. Tune saves these three with the run's trials, as JSON, for a restored run.

    ``SEARCH`` is there until `extend_controller`, which a run whose trials have all ended does not come to.
    """
    return vars(controller)


def replace_actor_manager(controller: TuneController, manager: ActorManager) -> None:
    """Let the controller run its trials by ``manager``, one actor for each trial run."""
    controller._reuse_actors = False
    manager.stand_before(controller._actor_manager)
    controller._actor_manager = manager


def turn(controller: Any) -> int:
    """Return how many turns Tune's loop has made, over all drivers."""
    return int(controller_behind(controller)._iteration)


def extend_controller(
    controller: TuneController,
    on_cleanup: Callable[[], None],
    status: Callable[[], str],
    search: Callable[[], dict[str, Any] | None] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
    cleaned_up: Callable[[], None] = lambda: None,
) -> None:
    """Have ``on_cleanup`` called when the controller begins to clean up, and the line of ``status`` shown to the user.

    ``cleaned_up`` is called when it has. Tune's loop ends as soon as ``is_over``, which changes within a step only.

    Every reporter of Tune, in a terminal and in a notebook, shows what the controller says of used resources; Tune's
    loop asks for it in each of its turns. ``status`` is added to it. The controller gets a new class for that,
    because Tune saves the controller's attributes. The class also has the ``_reuse_actors`` that is in force, so that a
    run that is restored hears it from its script again. Each snapshot of Tune keeps what ``search`` returns.
    """
    ours = type(controller)
    vars(controller).pop("_reuse_actors", None)
    vars(controller).pop(SEARCH, None)

    def cleanup(self: TuneController) -> None:
        on_cleanup()
        try:
            ours.cleanup(self)
        finally:
            cleaned_up()

    def is_finished(self: TuneController) -> bool:
        return is_over() or ours.is_finished(self)

    def used_resources(self: TuneController) -> str:
        return f"{ours._used_resources_string(self)}\n{status()}"

    def state(self: TuneController) -> dict[str, Any]:
        kept = search()
        return ours.__getstate__(self) if kept is None else {**ours.__getstate__(self), SEARCH: kept}

    changed: dict[str, Any] = {"cleanup": cleanup, "_used_resources_string": used_resources}
    changed.update(__getstate__=state, _reuse_actors=False, is_finished=is_finished)
    controller.__class__ = type(ours.__name__, (ours,), changed)


def storage(controller: TuneController) -> Any:
    """Return the experiment's `StorageContext`."""
    return controller._storage


def run_stopper(controller: TuneController) -> Any:
    """Return the run's stopper object."""
    return controller._stopper


def max_pending_trials(controller: TuneController) -> int:
    """Return how many trials Tune lets be pending at a time by itself.

    What it has now is not that in a restored run: Tune saves the number, and FluidTune may have raised it.
    """
    controller.update_max_pending_trials()
    return controller._max_pending_trials


def pending_trials_said() -> bool:
    """Return whether the user has set how many trials may be pending."""
    return os.environ.get("TUNE_MAX_PENDING_TRIALS_PG", "auto") != "auto"


def pending_again(controller: TuneController) -> int:
    """Return how many pending trials have run before. Tune's loop asks in each turn, with up to 200 trials pending."""
    # `Trial.last_result` asks Ray for a trial that has none, and takes ten times as long.
    return sum(1 for trial in controller._pending_trials if trial.run_metadata.last_result.get(TRAINING_ITERATION))


def set_status(controller: Any, trial: Trial, status: str) -> None:
    """Set a paused trial to PENDING, or a pending one to PAUSED. ``controller``: as a scheduler is handed it."""
    controller._set_trial_status(trial, status)


def flat_last_result(trial: Trial) -> dict[str, Any]:
    """Return the trial's last result as Tune hands it to a scheduler."""
    flat: dict[str, Any] = flatten_dict(trial.last_result)
    return flat


def put_in_order(controller: Any, trials: Sequence[str]) -> None:
    """Put Tune's trials in the order of these ids; others come last. A restored run has them by their latest results.

    PBT and Tune take the first one of several alike. ``controller``: as a scheduler is handed it.
    """
    places = {name: place for place, name in enumerate(trials)}
    controller.get_trials().sort(key=lambda trial: places.get(trial.trial_id, len(places)))


def note_no_encoded_objects() -> None:
    """Have Tune's encoder of states keep nothing of what it has encoded.

    For a line of its log at the level of debug it keeps the text of each object that JSON does not know, as long as the
    process lives: one for each checkpoint, which has that iteration's result and its configuration.
    """
    serialization.log_once = lambda key: False


def is_pausing(controller: TuneController) -> bool:
    """Whether an algorithm has paused a trial that still saves its checkpoint, so that Tune has not paused it yet."""
    return TrialScheduler.PAUSE in controller._cached_trial_decisions.values()


def begin_to_save_state(controller: TuneController) -> None:
    """Have Tune write its state now. It gets into the run's storage meanwhile; Tune logs what prevents that."""
    controller.checkpoint(force=True)


def save_state(controller: TuneController) -> None:
    """Have Tune save its state, and wait until that is in the run's storage.

    What the file system raises comes through, which Tune itself would only log.
    """
    controller.checkpoint(force=True)
    controller._storage.syncer.wait()


def keep_checkpoint(controller: TuneController, trial: Trial, saved: TrainingResult) -> None:
    """Let Tune register a checkpoint that it has not asked for, by the step that it takes after its own ``save``.

    What Tune waits for stays as it is: a ``save`` of its own, and what it will decide after that.
    """
    decision = controller._cached_trial_decisions.pop(trial.trial_id, None)
    waited_for = trial.temporary_state.saving_to
    controller._process_trial_save(trial, saved)
    trial.temporary_state.saving_to = waited_for
    if decision is not None:
        controller._cached_trial_decisions[trial.trial_id] = decision


def let_go(trial: Trial) -> None:
    """Free what the trial's process has said of itself, which Tune reads of a trial without a result only."""
    if trial.run_metadata.last_result.get(TRAINING_ITERATION):  # without a result, Tune puts the trial's id there
        trial._default_result_or_future = None


def tell(tracked: TrackedActor, what: Literal["started", "stopped", "failed"], *error: Exception) -> None:
    """Tell Tune what this actor became, and of a failed one the error, unless Tune has taken its callback back."""
    callback = {"started": tracked._on_start, "stopped": tracked._on_stop, "failed": tracked._on_error}[what]
    if callback is not None:
        callback(tracked, *error)


class ActorManager(abc.ABC):
    """What Tune's controller calls of its `RayActorManager`, under Ray's names and signatures.

    One thing: each method is one of Ray's, or the one that answers it.

    A subclass answers under FluidTune's names. When a Ray release changes `RayActorManager`, only this class changes.
    It stands before the controller's `RayActorManager`, which runs the trials that the subclass does not host.
    """

    def __init__(self) -> None:
        #: The controller's `RayActorManager`, once this one stands before it.
        self._rays: Any = None
        #: The trials' actors that Ray's manager has made, by ``actor_id``.
        self._by_ray: set[int] = set()
        #: Ray's manager is asked for an event before the subclass is.
        self._ray_first = False
        #: The controller reads this attribute: tracked actor -> (handle of the actor, its resources). Those of Ray's
        #: manager are seen in it.
        self._live_actors_to_ray_actors_resources: Any = {}
        #: The controller calls ``resolve_future`` of this attribute.
        self._actor_task_events = self
        #: Tracked actors of trials that were reported as failed, by ``actor_id``.
        self._failed: set[int] = set()

    def stand_before(self, rays: Any) -> None:
        """Take the place of ``rays``, the controller's `RayActorManager`, before any trial runs."""
        self._rays = rays
        self._live_actors_to_ray_actors_resources = ChainMap({}, rays._live_actors_to_ray_actors_resources)

    # --- for the subclass

    def set_live(self, tracked: TrackedActor, actor: Any) -> None:
        """The trial runs in this actor from now on."""
        self._live_actors_to_ray_actors_resources[tracked] = (actor, None)

    def unset_live(self, tracked: TrackedActor) -> bool:
        """The trial runs in no actor from now on. Returns whether it ran in one."""
        return self._live_actors_to_ray_actors_resources.pop(tracked, None) is not None

    def set_failed(self, tracked: TrackedActor) -> None:
        """The trial has failed: the controller's further calls for this actor do nothing."""
        self._failed.add(tracked.actor_id)
        self.unset_live(tracked)

    @abc.abstractmethod
    def hosts(self, trial_id: str) -> bool:
        """Whether the trial is the subclass's. False: Ray runs it, and none of the methods below hears of it."""

    @abc.abstractmethod
    def add_trial(self, tracked: TrackedActor, trial_id: str, kwargs: dict[str, Any]) -> None:
        """Tune wants the trial to run. ``kwargs``: of its trainable's constructor."""

    @abc.abstractmethod
    def release_trial(self, tracked: TrackedActor) -> bool:
        """Tune lets go of the trial. Returns whether it ran in an actor; Tune is then told when that has stopped."""

    @abc.abstractmethod
    def call_trainable(
        self,
        tracked: TrackedActor,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_result: Callable[..., None] | None,
        on_error: Callable[..., None] | None,
    ) -> Any:
        """Call a method of the trial's trainable after all that were asked for before. Returns its future.

        While the call waits for others, what is returned is known to `answer_call` alone. None is returned where the
        answer is known already.
        """

    @abc.abstractmethod
    def drop_calls(self, tracked: TrackedActor) -> None:
        """Tune is not interested any more in what it has called of this trial's trainable."""

    @abc.abstractmethod
    def drop_failure(self, tracked: TrackedActor) -> None:
        """Tune lets go of an actor that has failed. It knows no trial of it any more, so nobody may tell it so."""

    @abc.abstractmethod
    def answer_call(self, future: Any) -> None:
        """Wait for what `call_trainable` returned, and tell Tune the result now."""

    @abc.abstractmethod
    def step(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds for one event, and call back into Tune for it. Returns whether one came."""

    @abc.abstractmethod
    def close(self) -> None:
        """The run is over: give every process and device back."""

    @abc.abstractmethod
    def resources_in_use(self) -> dict[str, float]:
        """Logical resources of the devices that trials hold."""

    @abc.abstractmethod
    def count_pending(self) -> int:
        """New trials that do not run yet."""

    @abc.abstractmethod
    def count_unfinished(self) -> int:
        """Trials that Tune wants to run, and all that has to be done yet for others."""

    @abc.abstractmethod
    def count_calls(self) -> int:
        """Calls of trainables' methods that are not answered."""

    # --- for Tune's controller

    def add_actor(
        self,
        cls: Any,
        kwargs: dict[str, Any],
        resource_request: Any,
        *,
        on_start: Callable[..., None] | None = None,
        on_stop: Callable[..., None] | None = None,
        on_error: Callable[..., None] | None = None,
    ) -> TrackedActor:
        trial_id = kwargs["config"][TRIAL_INFO].trial_id
        if not self.hosts(trial_id):
            tracked = self._rays.add_actor(
                cls, kwargs, resource_request, on_start=on_start, on_stop=on_stop, on_error=on_error
            )
            self._by_ray.add(tracked.actor_id)
            return tracked
        tracked = TrackedActor(uuid.uuid4().int, on_start=on_start, on_stop=on_stop, on_error=on_error)
        self.add_trial(tracked, trial_id, kwargs)
        return tracked

    def remove_actor(self, tracked_actor: TrackedActor, kill: bool = False, stop_future: Any = None) -> bool:
        if tracked_actor.actor_id in self._by_ray:
            return self._rays.remove_actor(tracked_actor, kill=kill, stop_future=stop_future)
        if self.is_actor_failed(tracked_actor):
            self.drop_failure(tracked_actor)
            return False
        return self.release_trial(tracked_actor)

    def is_actor_started(self, tracked_actor: TrackedActor) -> bool:
        if tracked_actor.actor_id in self._by_ray:
            return self._rays.is_actor_started(tracked_actor)
        return tracked_actor in self._live_actors_to_ray_actors_resources

    def is_actor_failed(self, tracked_actor: TrackedActor) -> bool:
        if tracked_actor.actor_id in self._by_ray:
            return self._rays.is_actor_failed(tracked_actor)
        return tracked_actor.actor_id in self._failed

    def schedule_actor_task(
        self,
        tracked_actor: TrackedActor,
        method_name: str,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        on_result: Callable[..., None] | None = None,
        on_error: Callable[..., None] | None = None,
        _return_future: bool = False,
    ) -> Any:
        if tracked_actor.actor_id in self._by_ray:
            return self._rays.schedule_actor_task(
                tracked_actor, method_name, args, kwargs, on_result, on_error, _return_future
            )
        if self.is_actor_failed(tracked_actor) or method_name == "stop":
            return None  # after "stop", remove_actor follows, which unloads the worker
        future = self.call_trainable(tracked_actor, method_name, args or (), kwargs or {}, on_result, on_error)
        return future if _return_future else None

    def clear_actor_task_futures(self, tracked_actor: TrackedActor) -> None:
        if tracked_actor.actor_id in self._by_ray:
            self._rays.clear_actor_task_futures(tracked_actor)
        else:
            self.drop_calls(tracked_actor)

    def get_live_actors_resources(self) -> dict[str, float]:
        if not self._by_ray:
            return self.resources_in_use()
        return dict(Counter(self.resources_in_use()) + Counter(self._rays.get_live_actors_resources()))

    @property
    def num_live_actors(self) -> int:
        return len(self._live_actors_to_ray_actors_resources)

    @property
    def num_pending_actors(self) -> int:
        return self.count_pending() + (self._rays.num_pending_actors if self._by_ray else 0)

    @property
    def num_total_actors(self) -> int:
        return self.count_unfinished() + (self._rays.num_total_actors if self._by_ray else 0)

    @property
    def num_actor_tasks(self) -> int:
        return self.count_calls() + (self._rays.num_actor_tasks if self._by_ray else 0)

    def resolve_future(self, future: Any) -> None:
        if self._by_ray and future in self._rays._actor_task_events.get_futures():
            self._rays._actor_task_events.resolve_future(future)
        else:
            self.answer_call(future)

    def next(self, timeout: float | None = None) -> bool:
        if not self._by_ray or not self._rays.num_total_actors:
            return self.step(timeout)
        # They take turns, so that none waits while the other one has events.
        self._ray_first = not self._ray_first
        if self._ray_first:
            return self._rays.next(timeout=0.0) or self.step(timeout)
        return self.step(0.0) or self._rays.next(timeout=timeout)

    def cleanup(self) -> None:
        self.close()
        if self._by_ray:
            self._rays.cleanup()

"""One tuning job: its engine, its devices, its workers, its trials and its log, wired together.

It is made when Tune adds the job's first trial, and closed when Tune cleans up. It carries no messages between Tune
and workers (the manager does) and takes no scheduling decision (the engine does).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import ray
from ray.tune.experiment import Trial
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter

from fluidtune import hash_seed
from fluidtune.cluster.hosting.commit_stores import delete_commits
from fluidtune.cluster.new_processes import NewProcesses
from fluidtune.cluster.pool import WorkerPool
from fluidtune.engine import Engine, Why
from fluidtune.engine import messages as m
from fluidtune.memory_trim import MemoryTrim
from fluidtune.ray_compat.checkpoint_deletion import delete_what_is_due
from fluidtune.ray_compat.cluster_state import in_local_mode
from fluidtune.ray_compat.controller import (
    HASH_SEED,
    REQUEST,
    asked_reuse,
    keep_checkpoint,
    max_pending_trials,
    pending_again,
    pending_trials_said,
    saved_with_run,
    storage,
    was_restored,
)
from fluidtune.ray_compat.descent import waits_for
from fluidtune.tune.device_setup import hold_devices, most_pending_groups, set_up_devices
from fluidtune.tune.experiment_folder import ExperimentFolder
from fluidtune.tune.gpu_telemetry import GpuTelemetry
from fluidtune.tune.job_log import JobLog
from fluidtune.tune.snapshots import Snapshots
from fluidtune.tune.stall_detector import StallDetector
from fluidtune.tune.trial_registry import TrialRegistry, is_one_bundle

logger = logging.getLogger(__name__)


class TuningJob:
    """See the module. Made by `for_controller`.

    One thing: it has what Tune's controller asks of a job, and hands each question on.
    """

    @classmethod
    def for_controller(cls, controller: Any, scheduler: Any, trial: Trial, undone: ExitStack) -> TuningJob | None:
        """The job of the controller's first trial; None when the job is left to Ray.

        A restored run is laid out as it was, whatever trial comes first now. ``undone``: what a failure undoes.

        Raises:
            FluidTuneError: the run has another driver, the cluster cannot hold what its first trial asks for, or the
                arbiter refuses the job.
        """
        asked = trial.placement_group_factory
        first = dict(asked.bundles[0]) if is_one_bundle(asked) else None
        # Tune adds the trials of a restored run in another order, and without those that have ended.
        request = saved_with_run(controller).setdefault(REQUEST, first)
        if in_local_mode():
            # A worker would take the script's own process for one that it may end.
            logger.warning("FluidTune: with ray.init(local_mode=True) the job runs as under stock Ray Tune")
            return None
        if request is None:
            logger.warning(
                "FluidTune: trials of this job ask for several bundles or a certain place; their placement is left to "
                "Ray Tune"
            )
            return None
        folder = ExperimentFolder(storage(controller), was_restored(controller))
        undone.callback(folder.lock.close)
        return cls(controller, scheduler, request, folder)

    def __init__(self, controller: Any, scheduler: Any, request: dict[str, float], folder: ExperimentFolder):
        self.settings = settings = scheduler.executor
        self._controller = controller
        self.scheduler = scheduler
        self.name = uuid.uuid4().hex[:8]
        #: Whether the run goes on from an earlier driver's, and whether a trial has reported to this one.
        self.restored, self.reported = was_restored(controller), False
        #: Where the job's event log is.
        self.folder = folder
        concurrency = _asked_concurrency(controller.search_alg)
        self.setup = set_up_devices(self.name, settings, request, concurrency, scheduler.adapter.synchronous)
        self.engine = Engine(
            lanes=self.setup.lanes,
            max_packing=self.setup.max_packing,
            search_limit=self.setup.layout.packing,
            concurrent_packing=self.setup.concurrent_packing,
            max_workers=settings.max_workers,
        )
        #: The job has had devices on several nodes at a time.
        self._several_nodes = False
        self.trials = TrialRegistry(scheduler, self.setup, request, concurrency)
        #: The experiment's name.
        self.experiment = storage(controller).experiment_dir_name
        #: How many trials Tune lets be pending by itself, and by how many we raised that.
        self._pending, self._ahead = max_pending_trials(controller), 0
        #: The devices that each trial of the next batch of events asks for.
        self.arriving: list[float] = []
        #: How many trials leave their devices with that batch. Each leaves one for a trial that arrives.
        self.departing = 0
        self.devices = hold_devices(self, settings, self.experiment, most_pending_groups(self._pending))
        folder.begin()
        #: The script says ``reuse_actors=True``: a process serves one trial after another.
        self.reuses = asked_reuse(controller)
        self.snapshots = Snapshots(controller, self._delete_commits)
        if (seed := saved_with_run(controller).get(HASH_SEED)) is not None:
            hash_seed.go_on_with(seed)
        self.pool = WorkerPool(
            self.setup.layout,
            self.devices,
            NewProcesses(self.setup.layout, self.devices, self.name, self.setup.mps, settings.fork_server),
            spares=settings.fork_server and not self.reuses,
            divided=self.setup.lanes is not None,
        )
        self.log = JobLog(self.experiment, self.folder.path, self.engine)
        self.gpu_telemetry = GpuTelemetry(self.experiment, self.log)
        self.stall_detector = StallDetector(settings.trial_timeout_s, settings.stall_timeout_s)
        self._memory_trim = MemoryTrim()
        #: Trials that are known to have ended for good.
        self._ended: set[str] = set()
        #: Trials that this driver has started, and whose log files it writes.
        self.started: set[str] = set()
        #: Tune gets a checkpoint of a trial that it has not asked for.
        self.keep_checkpoint = partial(keep_checkpoint, controller)

    # --- devices

    def begin(self, wait_s: float) -> list[m.Event]:
        """Wait up to ``wait_s`` seconds for a first device, begin the event log, and return the devices that came."""
        came = self.setup.shown_nodes(self.devices.poll(wait_s)[0])
        seed = hash_seed.of_workers(dict(ray.get_runtime_context().runtime_env))
        saved_with_run(self._controller)[HASH_SEED] = seed
        self.log.run_started(self.experiment, self.scheduler, self.setup.layout.kind, came)
        return [m.DeviceGained(device, node) for device, node in came.items()]

    @property
    def newcomers(self) -> Sequence[float]:
        """Of ``arriving``, those for which no device becomes free with the same events."""
        return self.arriving[self.departing :]

    def is_in_use(self, device: int) -> bool:
        """Whether anything of this job runs on the device, or may: the engine may not know the device yet."""
        return not self.engine.is_free(device) or self.pool.has_busy_worker(device)

    # --- the engine

    def decide(self, events: list[m.Event]) -> list[m.Instruction]:
        """Hand a batch of events to the engine and return its instructions; both are written down."""
        self.log.events_heard(events, self.trials.known)
        self.arriving.clear()
        self.departing = 0
        for event in events:
            if isinstance(event, m.TrialEnded) or (isinstance(event, m.WorkerLost) and not event.left):
                self.stall_detector.stop_watching(event.trial)
        instructions = self.engine.handle(*events, now=time.time())
        self.log.instructions_given(instructions)
        return instructions

    # --- a trial that runs

    def on_one_node(self) -> bool:
        """Whether the leader of a trial that is loaded now is to be found on its own node only."""
        self._several_nodes = self._several_nodes or len(set(self.devices.nodes.values())) > 1
        return self.setup.one_node and not self._several_nodes

    def on_several_nodes(self, devices: Collection[int]) -> bool:
        """See `Outside`."""
        return len({self.devices.nodes.get(device) for device in devices} - {None}) > 1

    # --- from time to time

    def ask_ahead(self, starting: int) -> None:
        """Let Tune ask the searcher for further trials while ``starting`` new ones only wait for their processes.

        Tune limits how many trials may be pending, to one with most searchers, and a trial is pending until its
        process runs: without this, workers would be started one after the other. Trials of a HyperBand rung that
        goes on are pending as well, all at once. They must not count either: a bracket that is not full yet would get
        no new trial meanwhile, and would be halved too early.

        Where the user has set the limit, no new trial is asked for beyond it.
        """
        ahead = (0 if pending_trials_said() else starting) + pending_again(self._controller)
        if ahead != self._ahead:
            self._ahead = ahead
            self._controller.update_max_pending_trials(self._pending + ahead)

    def do_periodic_work(self, unloading: bool) -> None:
        """Name silent trials, have Tune save, clean up commits, and give memory back.

        ``unloading``: a worker unloads a trial.
        """
        for silent in self.stall_detector.newly_silent(time.monotonic()):
            devices = self.engine.held_devices().get(silent.trial, ())
            workers = [worker for worker in self.pool.workers.values() if worker.device in devices and worker.busy]
            self.log.silent(silent, [bundle for worker in workers for bundle in waits_for(worker.actor)])
        self.snapshots.save_if_due()
        if not unloading:
            self.snapshots.delete_commits()
        self._memory_trim.now_and_then()

    # --- the end

    def trial_ended(self, trial: Trial, ending: m.Ending) -> None:
        """Tune let go of the trial. If it has ended well, its commits go once the storage has that.

        A failed one keeps them: `Tuner.restore` with ``resume_errored`` goes on from there.
        """
        if ending != "paused":
            self.stall_detector.forget(trial.trial_id)
        if ending == "stopped" and trial.trial_id not in self._ended:
            self._ended.add(trial.trial_id)
            self.snapshots.trial_ended(trial)

    def trial_refused(self, trial: str, why: Why) -> None:
        """No worker of the job can host the trial, and it fails."""
        self._ended.add(trial)
        self.log.ended(trial, "failed", why)

    def trial_removed(self, trial: Trial) -> None:
        """Tune stopped a trial that is not the engine's, such as one that this driver or the one before has paused."""
        if trial.trial_id not in self._ended:
            self.trial_ended(trial, "stopped")
            self.log.ended(trial.trial_id, "stopped")

    def _delete_commits(self, trial: Trial) -> None:
        delete_what_is_due()  # the trial goes on from no checkpoint any more
        if self.has_commits(trial):
            delete_commits(trial.storage)

    def has_commits(self, trial: Trial) -> bool:
        """Whether the trial writes commits."""
        return self.trials.shown_by(trial).kind == "elastic"

    def close(self) -> None:
        """End the log, draw the report, let workers end and give devices back; nothing is written after that."""
        self.log.run_ended(self._controller.get_trials(), self.scheduler.metric, self.scheduler.mode)
        try:
            self.pool.close()
            self.devices.close()
            self.setup.remove_files()
            self.snapshots.delete_commits()
        finally:
            self.log.close()
            self.folder.close()


def _asked_concurrency(search_alg: Any) -> int | None:
    """How many trials the script wants in flight (``max_concurrent_trials``, a ConcurrencyLimiter), if it says."""
    if isinstance(search_alg, BasicVariantGenerator):
        return search_alg.max_concurrent or None
    searcher = getattr(search_alg, "searcher", None)
    while searcher is not None:
        if isinstance(searcher, ConcurrencyLimiter):
            return searcher.max_concurrent
        searcher = getattr(searcher, "searcher", None)
    return None

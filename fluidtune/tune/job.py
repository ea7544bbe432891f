"""One tuning job's belongings: its devices, its workers, its engine and its event log.

It is made when Tune adds the job's first trial, and closed when Tune cleans up. It carries no messages (the
manager does) and takes no scheduling decision (the engine does).
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.tune import PlacementGroupFactory
from ray.tune.experiment import Trial
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from ray.tune.trainable import FunctionTrainable
from ray.util.metrics import Counter, Gauge

import fluidtune
from fluidtune.cluster.commit_stores import delete_commits
from fluidtune.cluster.device_source import DeviceSource
from fluidtune.cluster.devices import DeviceSpec, Reservation, layout
from fluidtune.cluster.emulated.occupancy_board import Board
from fluidtune.cluster.emulated.paced_trainable import Emulation, paced
from fluidtune.cluster.lanes import LaneSettings, Ticket
from fluidtune.cluster.mps import MpsSettings
from fluidtune.cluster.worker import IterationReply, overrides_checkpointing
from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.engine.packing_search import SEARCH_LIMIT
from fluidtune.errors import FluidTuneError
from fluidtune.profiles import DEVICES_PER_NODE, Profile
from fluidtune.ray_compat.controller import max_pending_trials, pending_again, storage
from fluidtune.report import EVENT_LOG_NAME, EventLog, write_report
from fluidtune.tune import result_logs
from fluidtune.tune.commit_cleanup import Endings
from fluidtune.tune.gpu_telemetry import GpuNotes
from fluidtune.tune.stall_detector import Silence
from fluidtune.tune.trial_run import Run
from fluidtune.tune.workers import Workers
from salus_share.seat_table import home

logger = logging.getLogger(__name__)


class Job:
    """See the module. Made by `for_controller`."""

    @classmethod
    def for_controller(cls, controller: Any, scheduler: Any, trial: Trial) -> Job | None:
        """The job that the controller's first trial shows; None when only Ray can place its trials."""
        request = trial.placement_group_factory
        if not _in_one_bundle(request):
            logger.warning(
                "FluidTune: trials of this job ask for %d bundles (%s); their placement is left to Ray Tune",
                len(request.bundles),
                request.bundles,
            )
            return None
        return cls(controller, scheduler, dict(request.bundles[0]))

    def __init__(self, controller: Any, scheduler: Any, request: dict[str, float]):
        settings = scheduler.executor
        #: What the first trial asks for.
        self._request = request
        self._controller = controller
        self._scheduler = scheduler
        self._concurrency = _asked_concurrency(controller.search_alg)
        spec = DeviceSpec.parse(settings.devices)
        on_cores = "GPU" not in request if spec is None else spec.kind == "cpu"
        # Two trials on one core take turns: nothing is to be found out there.
        search = settings.max_packing is None and not on_cores
        # A script may ask for more trials at once than there are cores; a GPU is asked for by each trial.
        packs = settings.max_packing is None and on_cores and not scheduler.synchronous
        self.layout = layout(
            spec,
            request,
            ray.cluster_resources(),
            max_packing=SEARCH_LIMIT if search else settings.max_packing or 1,
            concurrency=self._concurrency if packs else None,
            leased=settings.arbiter is not None,
            nodes=[node["Resources"] for node in ray.nodes() if node["Alive"]],
        )
        self.backend = settings.backend
        self.torch_device = "cuda" if self.layout.kind == "gpu" else "cpu"
        self.name = uuid.uuid4().hex[:8]
        self.emulation = _emulation(settings, self.layout.count) if self.layout.kind == "emulated" else None
        self.reservation: DeviceSource
        if settings.arbiter is None:
            self.reservation = Reservation(self.layout)
        else:
            # Here and not above: a job of its own needs neither Themis nor its solver.
            from fluidtune.tune.leased_devices import LeasedDevices, Progress

            app = storage(controller).experiment_dir_name
            most = self.layout.count if spec and spec.count else None
            work = Progress(lambda: self.engine, lambda group: self._groups[group], settings.max_workers, most)
            self.reservation = LeasedDevices(self.layout, app, work, self.in_use)
        #: The policy of devices that several trials share, None: shared by count alone, or never.
        self.lanes = settings.lanes if self.layout.packing > 1 else None
        self._device_memory = settings.device_memory
        under_mps = self.lanes is not None and self.layout.kind == "gpu"
        mps = MpsSettings(self._device_memory) if under_mps else None
        self.engine = Engine(
            lanes=self.lanes,
            max_packing=None if search else min(settings.max_packing or 1, self.layout.packing),
            search_limit=self.layout.packing,
            concurrent_packing=self.layout.packing if packs else 1,
            max_workers=settings.max_workers,
        )
        #: Trials that Tune lets be pending by itself, and how many we added to that.
        self._pending, self._ahead = max_pending_trials(controller), 0
        #: Groups that the engine knows, and what is to follow each; see `Membership`.
        self._groups: dict[str, tuple[tuple[int, float], ...]] = {}
        self._refs: dict[Any, Any] = {}
        self._kinds: dict[str, m.Kind] = {}
        self._in_use: dict[str, tuple[int, ...]] = {}
        self._started = time.time()
        self._endings = Endings(lambda: controller.checkpoint(force=True, wait=True), self._delete_commits)
        #: Trials that are known to have ended for good.
        self._ended: set[str] = set()
        self.silence = Silence()
        #: Trials that this driver has started.
        self._logged: set[str] = set()
        directory = self._directory(controller)
        self._log = EventLog(directory / EVENT_LOG_NAME)
        self._gpus = GpuNotes(self.name, self._log)
        self.workers = Workers(self.layout, self.reservation, self.name, self._log, self._gpus, mps)
        self._busy = Gauge("fluidtune_devices_busy", "Devices that a trial holds", ("job",))
        self._waiting = Gauge("fluidtune_trials_waiting", "Trials that wait for a device", ("job",))
        self._iterations = Counter("fluidtune_iterations", "Iterations reported to Tune", ("job",))
        self._resizes = Counter("fluidtune_resizes", "Resizes done", ("job",))

    @staticmethod
    def _directory(controller: Any) -> Path:
        """Where the event log goes: the experiment's directory, or what Tune uploads to it."""
        place = storage(controller)
        local = place.storage_filesystem.type_name in ("local", "subtree")
        path = Path(place.experiment_fs_path if local else place.experiment_driver_staging_path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    # --- devices

    def devices_there(self, wait_s: float) -> list[tuple[int, str]]:
        """Wait a little for the first devices, begin the event log, and name those that are there."""
        came = self._nodes(self.reservation.poll(wait_s)[0])
        scheduler = self._scheduler
        self._log.write(
            "run_started",
            run=storage(self._controller).experiment_dir_name,
            ray=ray.__version__,
            fluidtune=fluidtune.__version__,
            python=platform.python_version(),
            machine=f"{platform.node()}, {os.cpu_count()} cores",
            kind=self.layout.kind,
            devices=[{"device": d, "node": node} for d, node in came.items()],
            settings={k: _plain(getattr(scheduler.executor, k)) for k in scheduler.executor.__dataclass_fields__},
            algorithm=type(scheduler.base_scheduler).__name__,
            metric=scheduler.metric,
            mode=scheduler.mode,
        )
        return list(came.items())

    def poll_devices(self) -> list[m.Event]:
        """What became of the devices since the last call."""
        came, gone = self.reservation.poll()
        events: list[m.Event] = []
        for device in gone:
            self.workers.clear(device)
            self._log.write("device_lost", device=device)
            events.append(m.DeviceLost(device))
        for device, node in self._nodes(came).items():
            self._log.write("device_gained", device=device, node=node)
            events.append(m.DeviceGained(device, node))
        events.extend(m.DeviceLeaving(device) for device in self.reservation.leaving())
        return events

    def in_use(self, device: int) -> bool:
        """Whether anything of this job runs on the device, or may: the engine may not have heard of it yet."""
        tenants = self.engine.devices.get(device)
        return tenants is None or bool(tenants) or self.workers.busy(device)

    def _nodes(self, came: dict[int, str]) -> dict[int, str]:
        """Emulated devices are on emulated nodes, whatever real one their workers run on."""
        if self.emulation is None:
            return came
        return {device: f"emulated-{device // DEVICES_PER_NODE}" for device in came}

    def resources_in_use(self) -> dict[str, float]:
        """Logical resources of the devices that trials hold, for Tune's display."""
        held = {device for devices in self._in_use.values() for device in devices}
        return {name: amount * len(held) for name, amount in self.layout.bundle.items()}

    def status_line(self, trials: int) -> str:
        held = {device for devices in self._in_use.values() for device in devices}
        wide = sum(1 for devices in self._in_use.values() if len(devices) > 1)
        waiting = max(0, trials - len(self._in_use))
        silent = f", silent: {' '.join(self.silence.named)}" if self.silence.named else ""
        return (
            f"FluidTune: {len(held)}/{len(self.reservation.nodes)} {self.layout.kind} devices busy, "
            f"{len(self._in_use)} trials on them ({wide} on several), {waiting} waiting{silent}"
        )

    # --- trials

    def admit(self, trial: Trial) -> None:
        """A later trial may ask for more devices than the first, not for what a worker made for that one lacks.

        Raises:
            FluidTuneError: it would run without.
        """
        request = trial.placement_group_factory
        if not _in_one_bundle(request):
            raise FluidTuneError(
                f"trial {trial.trial_id} asks for several bundles ({request.bundles}), the job's first trial for one; "
                "ask for as many in all of them"
            )
        for name, amount in request.bundles[0].items():
            first = self._request.get(name, 0.0)
            lacks = amount > first and name not in ("CPU", "GPU")
            if name == "GPU" and amount:
                lacks = not first and self._scheduler.executor.devices is None
            if lacks:
                remedy = ', or give the job devices="gpu"' if name == "GPU" else ""
                raise FluidTuneError(
                    f"trial {trial.trial_id} asks for {amount:g} {name}, the job's first trial for {first:g}, and its "
                    f"workers are made for that one; let all trials ask for as much{remedy}"
                )

    def trainable_ref(self, trial: Trial) -> Any:
        """The trial's trainable in Ray's object store, put there once."""
        trainable = trial.get_trainable_cls()
        if trainable not in self._refs:
            emulated = self.emulation and paced(trainable, self.emulation)
            self._refs[trainable] = ray.put(emulated or trainable)
        return self._refs[trainable]

    def arrival(self, trial: Trial) -> list[m.Event]:
        """What the engine is told when Tune wants this trial to run."""
        member = self._scheduler.membership(trial)
        events: list[m.Event] = []
        new = member.group not in self._groups
        self._groups[member.group] = member.rungs
        if new:
            concurrency = None if member.synchronous else self._concurrency
            events.append(m.GroupAnnounced(member.group, member.synchronous, concurrency, member.tail))
            self._log.write(
                "group_announced",
                group=member.group,
                synchronous=member.synchronous,
                algorithm=type(self._scheduler.base_scheduler).__name__,
                concurrency=concurrency,
            )
        done = float((trial.last_result or {}).get("training_iteration") or 0.0)
        left = None if member.target is None else max(0.0, member.target - done)
        kind = self.kind_of(trial)
        share = self.share_of(trial)
        self._log.write(
            "trial_added", trial=trial.trial_id, group=member.group, kind=kind, iterations=left, share=float(share)
        )
        traits = tuple((name, repr(value)) for name, value in (trial.evaluated_params or {}).items())
        events.append(m.TrialAdded(trial.trial_id, member.group, kind, left, share, traits))
        return events

    def goes_on(self, trial_id: str, group: str) -> None:
        """A trial went on into ``group`` without a pause; the engine keeps it where it was, and what follows there is
        what follows ``group``."""
        known = self.engine.trial(trial_id).group
        if known != group:
            self._groups[known] = ()

    def share_of(self, trial: Trial) -> float:
        """What the trial asks of one device, or how many whole ones."""
        return self.layout.share_of(trial.placement_group_factory.bundles[0])

    def kind_of(self, trial: Trial) -> m.Kind:
        """What one trial of a trainable turned out to be, the next one will be too, until it shows otherwise."""
        return self._kinds.get(trial.trainable_name, "plain")

    def align_logs(self, run: Run) -> None:
        """Before Tune starts a trial: its log files must not lose or repeat what was reported."""
        if run.id in self._logged:
            if run.trial.checkpoint:
                result_logs.upload(run.trial)
        else:
            result_logs.take_over(run.trial, run.delivered)
        self._logged.add(run.id)

    def ended(self, trial: Trial, ending: m.Ending) -> None:
        """Tune let go of the trial; when it is for good, its commits go as soon as Tune has saved that it ended."""
        if ending != "paused" and trial.trial_id not in self._ended:
            self._ended.add(trial.trial_id)
            self._endings.add(trial)

    def settle(self, cleaning: bool) -> None:
        """What is due from time to time. ``cleaning``: whether a worker still cleans up after a trial."""
        now = time.monotonic()
        self.workers.kill_overdue(now)
        self._name_silent(now)
        self._endings.settle(cleaning)

    def _name_silent(self, now: float) -> None:
        for silent in self.silence.overdue(now):
            usual = f"its iterations took up to {silent.usual:.3g} s" if silent.usual else "nothing was reported yet"
            devices = list(self._in_use.get(silent.trial, ()))
            logger.warning(
                "FluidTune: trial %s has not reported for %.0f s (%s). It keeps devices %s; look at its logs, and stop "
                "it if it hangs",
                silent.trial,
                silent.seconds,
                usual,
                devices,
            )
            self._log.write("trial_silent", trial=silent.trial, seconds=silent.seconds, usual=silent.usual)

    def ask_ahead(self, starting: int) -> None:
        """Let Tune ask the searcher for the next trial while ``starting`` new ones wait for their processes only.

        Tune asks for as many as may be pending, one with most searchers, and takes a trial for pending until its
        process runs: workers would be started one after the other. A rung that HyperBand lets go on is pending, too,
        all of it at once: a bracket that is not full yet would get no trial meanwhile, and be halved too early.
        """
        ahead = starting + pending_again(self._controller)
        if ahead != self._ahead:
            self._ahead = ahead
            self._controller.update_max_pending_trials(self._pending + ahead)

    def _delete_commits(self, trial: Trial) -> None:
        if self.kind_of(trial) == "elastic":
            delete_commits(trial.storage)

    def commits(self, run: Run) -> bool:
        """The trial goes on from wherever it is unloaded."""
        return run.kind == "elastic" and self.emulation is None

    def saves(self, run: Run) -> bool:
        """The trial can be asked for a checkpoint at any iteration."""
        trainable = run.trial.get_trainable_cls()
        return not issubclass(trainable, FunctionTrainable) and overrides_checkpointing(trainable)

    def kind_found(self, trial: Trial, kind: m.Kind) -> None:
        self._kinds[trial.trainable_name] = kind
        self._log.write("kind_found", trial=trial.trial_id, kind=kind)

    def decide(self, events: list[m.Event]) -> list[m.Instruction]:
        """Hand a batch of events to the engine; log what it says and what it means for who holds what."""
        for event in events:
            if isinstance(event, m.TrialEnded):
                self._in_use.pop(event.trial, None)
                self.silence.gone(event.trial)
                self._log.write("trial_ended", trial=event.trial, ending=event.ending)
            elif isinstance(event, m.WorkerLost) and not event.left:
                self._in_use.pop(event.trial, None)
                self.silence.gone(event.trial)
                self._log.write("trial_suspended", trial=event.trial)
            elif isinstance(event, (m.Resized, m.ResizeFailed)) and event.trial in self._in_use:
                self._in_use[event.trial] = event.devices
        instructions = self.engine.handle(*events, now=time.time())
        for instruction in instructions:
            if isinstance(instruction, m.Start):
                self._in_use[instruction.trial] = instruction.devices
                self._log.write(
                    "trial_started",
                    trial=instruction.trial,
                    # Those promised besides are held from when their workers are there; `resized` says so.
                    devices=list(self.engine.trial(instruction.trial).devices),
                    share=float(instruction.share),
                    resumed=isinstance(instruction, m.Resume),
                )
        self._waiting.set(len(self.engine.waiting), {"job": self.name})
        self._busy.set(len({d for devices in self._in_use.values() for d in devices}), {"job": self.name})
        return instructions

    def lane_settings(self, device: int) -> LaneSettings | None:
        """How the trials of this device share it."""
        if self.lanes is None:
            return None
        cores = self.layout.bundle.get("CPU", 1.0)
        return LaneSettings(self._lanes_of(device), self.lanes, self._device_memory, cores, self.layout.packing)

    def _lanes_of(self, device: int) -> str:
        return f"fluidtune-{self.name}-{device}"

    def ticket(self, run: Run) -> Ticket | None:
        """What the trial shares its device with, None while it has it alone."""
        if self.lanes is None:
            return None
        view = self.engine.trial(run.id)
        if len(view.devices) != 1 or len(self.engine.tenants(view.devices[0])) == 1:
            return None
        return Ticket(view.need, view.height, view.rung, view.least)

    def result(self, run: Run, outcome: IterationReply) -> None:
        self.silence.heard(run.id, outcome.seconds)
        metric = self._scheduler.metric
        value = outcome.result.get(metric) if metric else None
        memory = {}
        if self.lanes is not None and outcome.memory is not None:
            memory = {"memory": [outcome.memory - outcome.ephemeral, outcome.ephemeral]}
        self._log.write(
            "trial_result",
            trial=run.id,
            iteration=run.delivered,
            seconds=outcome.seconds,
            width=self._width(run),
            metric=float(value) if isinstance(value, (int, float)) else None,
            **memory,
        )
        self._iterations.inc(1, {"job": self.name})
        if outcome.gpu is not None:
            self._gpus.sampled(run.devices[0], outcome.gpu, self.workers.living)

    def _width(self, run: Run) -> float:
        """What the trial really runs at: workers, or its share of one device beside those that are there."""
        if run.width > 1 or self.lanes is None:
            return float(run.width if run.width > 1 else 1 / max(1, len(self.engine.tenants(run.devices[0]))))
        return self.engine.trial(run.id).width

    def resized(self, run: Run, seconds: float) -> None:
        self._log.write("resized", trial=run.id, devices=list(run.wanted), seconds=seconds)
        self._resizes.inc(1, {"job": self.name})

    def log(self, event: str, **fields: Any) -> None:
        self._log.write(event, **fields)

    # --- the end

    def wind_up(self, trials: Iterable[Trial]) -> None:
        """Tune's run is over, in order, by Ctrl-C or by an exception; of what has not ended for good all is kept."""
        for trial in trials:
            if trial.is_finished():
                self.ended(trial, "stopped")  # paused ones that a stopper ended with all others
        # Tune has saved its final state, unless it cleans up for an exception.
        self._endings.wind_up(saved=sys.exc_info()[0] is None)

    def close(self, trials: Iterable[Trial]) -> None:
        """Kill the workers, give the devices back, end the log and draw the pictures."""
        self.workers.close()
        self.reservation.close()
        if self.emulation is not None:
            os.unlink(self.emulation.board)
        if self.lanes is not None:
            for device in range(self.layout.count):
                # Of this node; on others their lane services leave a log and two lock files, empty.
                shutil.rmtree(home(self._lanes_of(device)), ignore_errors=True)
        self._endings.close()
        trials = list(trials)
        metric = self._scheduler.metric
        values = {
            t.trial_id: float(t.last_result[metric])
            for t in trials
            if metric and isinstance((t.last_result or {}).get(metric), (int, float))
        }
        best = None
        if values:
            trial = (min if self._scheduler.mode == "min" else max)(values, key=lambda name: values[name])
            best = {"trial": trial, "metric": values[trial]}
        self._log.write("run_ended", seconds=time.time() - self._started, trials=len(trials), best=best)
        self._log.close()
        # Takes a second, most of it to import matplotlib: Tune and Ray wind up meanwhile. Python waits for it to end.
        threading.Thread(target=_draw, args=(self._log.path,), name="fluid-report").start()


def _in_one_bundle(request: PlacementGroupFactory) -> bool:
    """Whether one process is all that a trial asks for."""
    return len(request.bundles) == 1 and not request.head_bundle_is_empty


def _emulation(settings: Any, devices: int) -> Emulation:
    """The profile and a board of this job's own."""
    descriptor, path = tempfile.mkstemp(prefix="fluidtune-emulated-")
    os.close(descriptor)
    Board.create(path, devices)
    return Emulation(settings.emulated_profile(), path)


def _plain(setting: Any) -> Any:
    return setting.name if isinstance(setting, Profile) else setting


def _draw(log: Path) -> None:
    try:
        write_report(log)
    except Exception:
        # The run's results are safe; a picture that cannot be drawn must not take them down.
        logger.exception("FluidTune: the report of this run could not be written")


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

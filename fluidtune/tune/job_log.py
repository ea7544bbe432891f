"""What is written of one job while it runs: its event log, Ray's gauges, Tune's status line, and the report at its end.

It decides nothing. The events and their fields are the schema in `fluidtune.report.events` (docs/events.md).
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.tune.experiment import Trial
from ray.util.metrics import Counter, Gauge

import fluidtune
from fluidtune.cluster.hosting.messages import IterationReply, WorkerInfo
from fluidtune.cluster.pool import PooledWorker
from fluidtune.driver_lock import this_machine
from fluidtune.engine import Engine, Reason, Why, because
from fluidtune.engine import messages as m
from fluidtune.profiles import Profile
from fluidtune.report import EVENT_LOG_NAME, EventLog
from fluidtune.report.iteration_lines import IterationLines
from fluidtune.report.metric_values import ranked, value_of
from fluidtune.tune.final_report import FinalReport
from fluidtune.tune.stall_detector import SilentTrial
from fluidtune.tune.trial_registry import parameters_of

logger = logging.getLogger(__name__)

#: Reasons that are messages of errors are cut to this many characters.
REASON_LENGTH = 500


class JobLog:
    """The log of one job, in ``directory``. ``job``: the job's name in the metrics. ``engine`` says who holds what.

    One thing: each kind of line in the log is one method.

    ``clock``: returns unix seconds; tests pass another clock.
    """

    def __init__(self, job: str, directory: Path, engine: Engine, clock: Callable[[], float] = time.time):
        self._job = job
        self._engine = engine
        self._clock = clock
        self._started = clock()
        self._iteration_lines = IterationLines()
        self._algorithm = ""
        #: By trial that is about to leave its devices: why, in words. See `leaves`.
        self._departures: dict[str, str] = {}
        self._events = EventLog(
            "FluidTune: the event log lacks events, because they cannot be written; the job goes on: %s"
        )
        self._events.open(directory, clock)
        self._report = FinalReport(directory / EVENT_LOG_NAME)
        self._devices_busy = Gauge("fluidtune_devices_busy", "Devices that a trial holds", ("experiment",))
        self._trials_waiting = Gauge("fluidtune_trials_waiting", "Trials that wait for a device", ("experiment",))
        self._iterations = Counter("fluidtune_iterations", "Iterations reported to Tune", ("experiment",))
        self._resizes = Counter("fluidtune_resizes", "Resizes done", ("experiment",))
        self._losses = Counter("fluidtune_workers_lost", "Workers that died", ("experiment",))

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. What cannot be written is lost, and one line says so: no trial depends on it."""
        before = self._iteration_lines.use.resizes
        for line in self._iteration_lines.before(event, fields):
            self._events.write("trial_result", **line)
        self._events.write(event, **fields)
        if done := self._iteration_lines.use.resizes - before:
            self._resizes.inc(done, {"experiment": self._job})

    # --- the run

    def run_started(self, run: str, scheduler: Any, kind: str, devices: Mapping[int, str]) -> None:
        """Begin the log. ``devices``: those that are there, each with its node."""
        self._algorithm = type(scheduler.base_scheduler).__name__
        settings = {name: getattr(scheduler.executor, name) for name in scheduler.executor.__dataclass_fields__}
        self.write(
            "run_started",
            run=run,
            ray=ray.__version__,
            fluidtune=fluidtune.__version__,
            python=platform.python_version(),
            machine=this_machine(),
            pid=os.getpid(),
            kind=kind,
            devices=[{"device": device, "node": node} for device, node in devices.items()],
            settings={name: set_.name if isinstance(set_, Profile) else set_ for name, set_ in settings.items()},
            algorithm=self._algorithm,
            metric=scheduler.metric,
            mode=scheduler.mode,
            no_keep=scheduler.adapter.no_keep,
        )

    def run_ended(self, trials: Sequence[Trial], metric: str | None, mode: str | None) -> None:
        """End the log, and begin to draw the report. `close` waits for it."""
        last = ((t.trial_id, value_of(t.last_result or {}, metric)) for t in trials if metric)
        best = next(({"trial": trial, "metric": value} for trial, value in ranked(last, mode)), None)
        self.write("run_ended", seconds=self._clock() - self._started, trials=len(trials), best=best)
        if self._events.is_open:
            self._events.close()
            self._report.begin()

    def close(self) -> None:
        """Return when everything that is written into the experiment's directory is there."""
        self._report.wait()

    # --- events and instructions of the engine

    def events_heard(self, events: Iterable[m.Event], trials: Mapping[str, Trial]) -> None:
        """Write down what the engine is about to hear of trials that come, and that leave their devices.

        ``trials``: Tune's, by their ids.
        """
        for event in events:
            if isinstance(event, m.GroupAnnounced):
                said = {"synchronous": event.synchronous, "algorithm": self._algorithm}
                self.write("group_announced", group=event.group, concurrency=event.concurrency, **said)
            elif isinstance(event, m.TrialAdded):
                self.write(
                    "trial_added",
                    trial=event.trial,
                    group=event.group,
                    kind=event.kind,
                    growable=event.growable,
                    iterations=event.iterations,
                    share=float(event.share),
                    name=str(trials[event.trial]),
                    parameters=parameters_of(trials[event.trial]),
                )
            elif isinstance(event, m.TrialEnded):
                self.ended(event.trial, event.ending)
            elif isinstance(event, m.WorkerLost) and not event.left:
                self.write("trial_suspended", trial=event.trial, **self._departure(event.trial, {}))

    def leaves(self, trial: str, reason: str) -> None:
        """The trial leaves its devices for this reason, in words. The next event that says so carries it."""
        self._departures[trial] = reason[:REASON_LENGTH]

    def _departure(self, trial: str, otherwise: Mapping[str, Any]) -> Mapping[str, Any]:
        reason = self._departures.pop(trial, None)
        return otherwise if reason is None else {"reason": reason}

    def ended(self, trial: str, ending: m.Ending, why: Why | None = None) -> None:
        """The trial is paused or ended. ``why``: of one that is refused, of which the engine does not hear."""
        why = because(Reason.PAUSED) if ending == "paused" else why
        self.write("trial_ended", trial=trial, ending=ending, **self._departure(trial, why.as_fields() if why else {}))

    def instructions_given(self, instructions: Iterable[m.Instruction]) -> None:
        """Write down which trials the engine has just started, which it wants elsewhere, and why others wait."""
        for instruction in instructions:
            if isinstance(instruction, m.Suspend):
                self.write("suspend_asked", trial=instruction.trial, **instruction.why.as_fields())
            if isinstance(instruction, m.Start):
                self.write(
                    "trial_started",
                    trial=instruction.trial,
                    # The trial holds further promised devices only once their workers are there; `resized` says so.
                    devices=list(self._engine.trial(instruction.trial).devices),
                    share=float(instruction.share),
                    resumed=isinstance(instruction, m.Resume),
                    **instruction.why.as_fields(),
                )
        for line, trials, why in self._engine.new_waits():
            # No iteration is due before it: it concerns no trial that holds devices.
            self._events.write("trial_waits", line=line, trials=trials, **why.as_fields())
        self._trials_waiting.set(self._engine.waiting_count, {"experiment": self._job})
        self._devices_busy.set(self._engine.held_count, {"experiment": self._job})

    def status_line(self, there: Collection[int], kind: str, trials: Collection[str], silent: Iterable[str]) -> str:
        """One line for Tune's display.

        ``there``: devices that are there; ``trials``: those that Tune wants to run.
        """
        held = {trial: devices for trial, devices in self._engine.held_devices().items() if trial in trials}
        wide = sum(1 for devices in held.values() if len(devices) > 1)
        waiting = len(trials) - len(held)
        names = " ".join(silent)
        return (
            f"FluidTune: {len(set().union(*held.values()))}/{len(there)} {kind} devices busy, "
            f"{len(held)} trials on them ({wide} on several), {waiting} waiting"
            + (f", silent: {names}" if names else "")
        )

    # --- trials

    def iteration(
        self, trial: str, number: int, width: float, reply: IterationReply, value: float | None, memory: bool
    ) -> None:
        """An iteration was reported. ``value``: the metric's; ``memory``: whether to write down what it needed."""
        needs = {}
        if memory and reply.memory is not None:
            needs = {"memory": [reply.memory - reply.ephemeral, reply.ephemeral]}
        line = {
            "trial": trial,
            "iteration": number,
            "seconds": reply.seconds,
            "width": width,
            "metric": value,
            **needs,
        }
        if reply.kept:
            return self._events.write("trial_result", **line, kept=True)
        for due in self._iteration_lines.iteration(line, self._clock()):
            self._events.write("trial_result", **due)
        self._iterations.inc(1, {"experiment": self._job})
        self._report.prepare()  # the first processes have started by now, and the driver mostly waits

    def silent(self, silent: SilentTrial, waits_for: list[dict[str, float]]) -> None:
        """The trial has not reported for long: warn the user. ``waits_for``: bundles that its devices' trials lack."""
        usual = f"its iterations took up to {silent.usual:.3g} s" if silent.usual else "nothing was reported yet"
        logger.warning(
            "FluidTune: trial %s has not reported for %.0f s (%s). It keeps devices %s; %s",
            silent.trial,
            silent.seconds,
            usual,
            list(self._engine.held_devices().get(silent.trial, ())),
            f"workers that trials there start in Ray wait for {waits_for}: let fewer trials run at a time, by "
            "TuneConfig(max_concurrent_trials=...)"
            if waits_for
            else "look at its logs, and stop it if it hangs",
        )
        self.write("trial_silent", trial=silent.trial, seconds=silent.seconds, usual=silent.usual)

    # --- workers

    def worker_started(self, worker: PooledWorker, info: WorkerInfo) -> None:
        """A new process is there."""
        self.write(
            "worker_started",
            worker=worker.name,
            device=worker.device,
            pid=info.pid,
            seconds=self._clock() - worker.asked,
            forked=info.forked,
            spare=worker.started_for == "spare",
            **({} if info.mps is None else {"mps": info.mps}),
        )

    def worker_lost(self, worker: PooledWorker, reason: str) -> None:
        """A process has died."""
        self.write("worker_lost", worker=worker.name, device=worker.device, reason=reason[:REASON_LENGTH])
        self._losses.inc(1, {"experiment": self._job})

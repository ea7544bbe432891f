"""A warm worker: a process that hosts one trial's leader or follower after another.

It decides nothing. A driver loads a trial into it, asks for one iteration at a time, and unloads the trial; the process
stays. Between Tune and the user's code stands only Ray's own `Trainable`, so checkpoints, loggers, working directory
and log files are those of stock Tune. Two things are added. A trial that goes on from its last commit runs again what
Tune has already seen, without reporting it again (`result_replay`). And an elastic loop finds its session
(`WorkerSession`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.tune import Trainable
from ray.tune.trainable import FunctionTrainable

from fluidtune import startup
from fluidtune.cluster import emulated
from fluidtune.cluster.commit_stores import commit_stores, delete_commits, fingerprint, follower_commit_store
from fluidtune.cluster.follower_host import FollowerHost, NotTakenIn, Ungrowable
from fluidtune.cluster.gpu_probe import GpuProbe, memory_needed, wait_for_gpu
from fluidtune.cluster.kept_trainable import KeptTrainable, can_stay
from fluidtune.cluster.lanes import Lack, LaneMember, LaneSettings, LaneTicket
from fluidtune.cluster.mps import MpsSettings, enter, failed, verify
from fluidtune.cluster.process_reset import ProcessBaseline
from fluidtune.cluster.result_replay import ReportedResults, without_results
from fluidtune.elastic import GroupLost, LazySession, Left, Reform, use, wake_on_first_use
from fluidtune.elastic.errors import CannotDivide, explain
from fluidtune.elastic.membership import LOOPBACK
from fluidtune.elastic.random_streams import Streams, capture_streams, restore_streams
from fluidtune.elastic.verdict import Verdict
from fluidtune.ray_compat import trainable as ray_trainable
from fluidtune.ray_compat.accelerators import adopt_environment
from salus_share.errors import StaleToken

if TYPE_CHECKING:
    from fluidtune.elastic import ElasticSession, FollowerSession, LeaderSession
    from fluidtune.engine.messages import Kind
    from salus_share.telemetry import DeviceSample


@dataclass(frozen=True)
class LoadSpec:
    """What a worker needs in order to host a trial.

    ``kwargs``: what Tune would pass to the trainable's constructor. ``delivered``: the number of iterations that Tune
    has seen. ``repeats``: those that run again are reported again. ``own_numbers``: see `ReportedResults`. ``backend``:
    the collective library. ``device``: "cpu" or "cuda". ``emulation``: set for emulated devices, which have no backend.
    ``streams``: `LeaderSession.streams` of the worker in which the trial's code began; None: it begins here. ``lanes``:
    how the trials of a device share it; None: not by lanes. ``ticket``: set if the device is shared now. ``secret``:
    the trial's, by which its workers recognise each other (`elastic.signing`). ``one_node``: all of its workers are on
    this node, so that no other one needs to reach them.
    ``rehearse``: see `FollowerHost.join`.
    """

    trial: str
    kwargs: dict[str, Any]
    delivered: int = 0
    repeats: bool = False
    own_numbers: bool = False
    backend: str = "torch"
    device: str = "cpu"
    emulation: emulated.Emulation | None = None
    streams: Streams | None = None
    lanes: LaneSettings | None = None
    ticket: LaneTicket | None = None
    secret: bytes = field(default=b"", repr=False)
    one_node: bool = False
    rehearse: bool = False


@dataclass
class IterationReply:
    """One iteration's result, and what the worker has learned in it.

    ``iteration``: its number by the trainable's own count. ``seconds``: duration of the iteration without the pause of
    a resize. ``width``, ``address``, ``mends``: see `LeaderSession`. ``streams``: see there; None if they were sent
    before. ``reformed``: generation and pause in seconds of a resize in this iteration. ``lost``: why there is no
    result, if another worker has died or its loop cannot go on with this one's. ``ungrowable``, ``refused``,
    ``differed``: see `LeaderSession`. ``lack``: there is no result, because the trial needs more room than it has.
    ``memory``: the part of the device's memory that the trial has needed so far; None: not known. ``ephemeral``: the
    part of the device's memory that it needs only within an iteration. ``busy``: the part of the time that it kept its
    device busy; None: not known. ``gpu``: what NVML says of the device; None in most iterations.
    """

    result: dict[str, Any]
    kind: Kind
    seconds: float
    iteration: int = 0
    width: int = 1
    address: tuple[str, int] | None = None
    reformed: tuple[float, float] | None = None
    lost: str | None = None
    ungrowable: str | None = None
    refused: float | None = None
    differed: str | None = None
    lack: Lack | None = None
    mends: bool = False
    streams: Streams | None = None
    memory: float | None = None
    ephemeral: float = 0.0
    busy: float | None = None
    gpu: DeviceSample | None = None


def _ungrowable(error: BaseException | None) -> str | None:
    """Why the trial must not have several workers, if that is what the error says; None: it does not."""
    return str(error) if isinstance(error, CannotDivide) else None


#: The gate of a device that is not shared by lanes.
_NO_GATE = contextlib.nullcontext()

#: The environment variable with the number of the emulated device that a worker process stands for.
DEVICE_VARIABLE = "FLUIDTUNE_EMULATED_DEVICE"


@dataclass
class WorkerInfo:
    """Who a worker is.

    ``pid``, ``gpus``: its process id and the ids of its GPUs. ``mps``: whether it is a client of MPS; None: it was not
    asked to be one. ``why``: why it could not become one.
    """

    pid: int
    gpus: list[str] = field(default_factory=list)
    mps: bool | None = None
    why: str = ""


def _leader_session(spec: LoadSpec, worker: str, **resuming: Any) -> LeaderSession:
    """The session of a trial's first worker, in use by this process from now on.

    ``resuming``: arguments of `ElasticSession`. A trial that begins anew gets a `LazySession`.
    """
    if spec.emulation is not None:
        return _emulated_session(spec, worker, leader=True)
    if resuming["resume"] is None:
        lazy = LazySession(lambda: _elastic_session(spec, worker, leader=True, **resuming))
        wake_on_first_use(lazy)
        return lazy
    return _in_use(_elastic_session(spec, worker, leader=True, **resuming))


def _follower_session(spec: LoadSpec, worker: str, **committing: Any) -> FollowerSession:
    """The session of another worker of a trial, in use by this process from now on.

    ``committing``: arguments of `ElasticSession`.
    """
    if spec.emulation is not None:
        return _emulated_session(spec, worker, leader=False)
    return _in_use(_elastic_session(spec, worker, leader=False, **committing))


def _emulated_session(spec: LoadSpec, worker: str, leader: bool) -> emulated.EmulatedSession:
    assert spec.emulation is not None
    device = int(os.environ[DEVICE_VARIABLE])
    session = emulated.EmulatedSession(spec.trial, worker, leader, device, spec.emulation, spec.secret)
    emulated.use_host(session)
    return session


def _elastic_session(spec: LoadSpec, worker: str, leader: bool, **more: Any) -> ElasticSession:
    # Imported here: a worker whose trials are not elastic needs no torch.
    from fluidtune.elastic import ElasticSession
    from fluidtune.elastic.backends import backend_class

    host = LOOPBACK if spec.one_node else ray.util.get_node_ip_address()
    backend = backend_class(spec.backend)(host=host, device=spec.device, secret=spec.secret)
    return ElasticSession(trial=spec.trial, worker=worker, leader=leader, backend=backend, device=spec.device, **more)


def _in_use(session: ElasticSession) -> ElasticSession:
    use(session)
    return session


def _storage(spec: LoadSpec) -> Any | None:
    """Tune's storage, where the trial's commits go; None: the trial makes no commits."""
    return None if spec.emulation is not None else spec.kwargs.get("storage")


def _drop_session(emulating: bool) -> None:
    if emulating:
        emulated.use_host(None)
        return
    wake_on_first_use(None)
    use(None)


class Worker:
    """The actor class. Its methods run one after the other in the process' main thread."""

    def __init__(self, name: str, environment: dict[str, str], mps: MpsSettings | None = None):
        startup.importing()  # until the first trial's modules are imported
        adopt_environment(environment)
        self._mps = None if mps is None else enter(mps, [str(gpu) for gpu in ray.get_gpu_ids()])
        self._name = name
        self._baseline = ProcessBaseline(watch=True)
        self._trainable: Trainable | None = None
        self._kept = KeptTrainable()
        #: The hosted trial: its session in a leader, its host in a follower.
        self._session: LeaderSession | None = None
        self._follower: FollowerHost | None = None
        self._spec: LoadSpec | None = None
        self._reports: ReportedResults | None = None
        self._has_checkpoint = False
        self._streams_sent = False
        self._lane: LaneMember | None = None
        self._gpu = GpuProbe()

    def info(self) -> WorkerInfo:
        """Who this worker is."""
        info = WorkerInfo(os.getpid(), [str(i) for i in ray.get_gpu_ids()])
        if self._mps is not None:
            info.mps, info.why = self._mps.client is not None, self._mps.why
        return info

    # --- a trial's leader

    def load(self, trainable_cls: type[Trainable], spec: LoadSpec) -> Lack | None:
        """Construct the trial's trainable here. What its ``setup`` raises is raised unchanged, unless a lack caused it.

        Returns what the device lacks for the trial, which is not loaded then; None: it is loaded.
        """
        assert self._trainable is None, f"{self._name} is still hosting a trial"
        startup.imported()
        self._baseline.note_imports()
        self._spec = spec
        kwargs = dict(spec.kwargs, config=dict(spec.kwargs["config"]))
        mark = fingerprint(kwargs["config"])
        reports = self._reports = ReportedResults(spec.delivered, mark, spec.repeats, spec.own_numbers)
        self._has_checkpoint = overrides_checkpointing(trainable_cls)
        storage = _storage(spec)
        stores = [] if storage is None else commit_stores(storage)
        resume = reports.choose_commit(stores)
        streams = spec.streams if resume is None else resume.streams
        if streams is not None:
            restore_streams(streams)
        self._streams_sent = False
        self._session = _leader_session(
            spec,
            self._name,
            commits=stores[0] if stores else None,
            resume=resume,
            streams=capture_streams(),
            fingerprint=mark,
            note=reports.note,
            brief=without_results,
            rewind=reports.rewind,
        )
        if spec.lanes is not None:
            if self._mps is not None:
                import torch

                verify(self._mps, torch)
            self._lane = LaneMember(spec.trial, spec.lanes, spec.device)
            lack = self._lane.settle(spec.ticket)
            if lack is not None:
                return lack
        try:
            self._trainable = reports.trainable = self._kept.reset_for(trainable_cls, kwargs) or trainable_cls(**kwargs)
        except Exception as error:
            lack = self._lack_behind(error)
            if lack is None:
                raise
            return lack
        reports.begin()
        return None

    def train(self, reform: Reform | None = None, ticket: LaneTicket | None = None) -> IterationReply:
        """Run up to the next iteration that Tune has not seen, and return its result.

        ``reform``: the group to form at the next boundary. ``ticket``: set if the device is shared now.
        """
        reports, session, spec = self._reports, self._session, self._spec
        assert reports is not None and session is not None and spec is not None, f"{self._name} hosts no trial"
        if reform is not None:
            session.direct(reform)
        missed = reports.next_missed()
        if missed is not None:
            return IterationReply(missed, self._kind(), missed["time_this_iter_s"], reports.reported)
        lack = self._lane.settle(ticket) if self._lane is not None else None
        if lack is not None:
            return IterationReply({}, self._kind(), 0.0, lack=lack)
        before = session.last_reform
        while True:
            started = time.perf_counter()
            try:
                with self._lane.iteration() if self._lane is not None else _NO_GATE:
                    result = self._iterate()
            except GroupLost as error:
                return IterationReply({}, self._kind(), 0.0, lost=str(error), ungrowable=_ungrowable(error))
            except Exception as error:
                lack = self._lack_behind(error)
                if lack is None:
                    raise
                return IterationReply({}, self._kind(), 0.0, lack=lack)
            seconds = time.perf_counter() - started
            if not reports.was_seen(result):
                break
        self._has_checkpoint = self._has_checkpoint or bool(result.get("should_checkpoint"))
        reformed = session.last_reform if session.last_reform != before else None
        if reformed is not None:
            seconds = max(0.0, seconds - reformed[1])
        reply = IterationReply(
            result=result,
            kind=self._kind(),
            seconds=seconds,
            iteration=reports.reported,
            width=session.width,
            address=session.address,
            reformed=reformed,
            mends=session.mends,
            streams=None if self._streams_sent else session.streams,
            ungrowable=session.ungrowable,
            refused=session.refused,
            differed=session.take_difference(),
        )
        self._streams_sent = reply.address is not None
        if self._lane is None:
            emulation = spec.emulation
            reply.memory = memory_needed() if emulation is None else emulation.profile.memory
        elif self._lane.need is not None:
            reply.memory, reply.ephemeral = sum(self._lane.need), self._lane.need[1]
            reply.busy = self._lane.busy
        reply.gpu = self._gpu.sample() if spec.device == "cuda" else None
        if reply.gpu is not None and reply.busy is None:
            reply.busy = reply.gpu.utilisation
        return reply

    def _iterate(self) -> dict[str, Any]:
        """One iteration. An elastic class trainable comes to its boundary before the iteration."""
        trainable, session, reports = self._trainable, self._session, self._reports
        assert trainable is not None and session is not None and reports is not None
        if not isinstance(trainable, FunctionTrainable) and session.is_elastic:
            session.boundary(trainable.iteration)
        try:
            result: dict[str, Any] = trainable.train()
            wait_for_gpu()
        except Exception as error:
            explain(error, session.lost, dismissed=False)
            raise
        if session.lost is not None:
            raise GroupLost(session.lost)
        if ray_trainable.RESULT_DUPLICATE not in result:
            reports.keep_result(result)
        return result

    def _lack_behind(self, error: Exception) -> Lack | None:
        """What the device lacks for the trial, if that is why its code raised the error; None: it is another error."""
        failed(self._mps, error)
        if self._lane is None:
            return None
        return self._lane.refused(error) if isinstance(error, StaleToken) else self._lane.failed(error)

    def _kind(self) -> Kind:
        assert self._session is not None
        if self._session.is_elastic:
            return "elastic"
        return "checkpointing" if self._has_checkpoint else "plain"

    def save(self, *args: Any) -> Any:
        """Tune's ``save``. After a recovery the trial first gets back to the iteration that Tune has seen last."""
        trainable, session, reports = self._trainable, self._session, self._reports
        assert trainable is not None and session is not None and reports is not None
        while trainable.iteration < reports.reported:
            if ray_trainable.RESULT_DUPLICATE in self._iterate():
                break
        if reports.resume is not None and not isinstance(trainable, FunctionTrainable):
            session.recall()
        if isinstance(trainable, FunctionTrainable) and not ray_trainable.has_reported(trainable):
            return ray_trainable.TrainingResult(checkpoint=None, metrics=dict(reports.last))
        return trainable.save(*args)

    def restore(self, checkpoint: Any, again: bool = False) -> int:
        """Tune's ``restore``. The trial goes on from its own commit instead, if that is newer than the checkpoint.

        ``again``: Tune has restored the checkpoint before, in another worker. Returns how many iterations count as
        reported.
        """
        trainable, session, spec, reports = self._trainable, self._session, self._spec, self._reports
        assert trainable is not None and session is not None and spec is not None and reports is not None
        trainable.restore(checkpoint)
        self._has_checkpoint = True
        if not again and not _is_own(checkpoint, spec):
            session.forget_resume()
            if reports.state_replaced():
                delete_commits(spec.kwargs["storage"])
        elif reports.checkpoint_restored():
            session.outrun_resume()
        return reports.reported

    def export_model(self, *args: Any, **kwargs: Any) -> Any:
        assert self._trainable is not None
        return self._trainable.export_model(*args, **kwargs)

    def get_current_ip_pid(self) -> Any:
        return ray.util.get_node_ip_address(), os.getpid()

    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> Any:
        # Tune asks when a trial starts, for display; the trial may have ended before the call arrives.
        return self._trainable.get_auto_filled_metrics(*args, **kwargs) if self._trainable is not None else {}

    # --- a follower

    def join(self, trainable_cls: type[Trainable], spec: LoadSpec) -> str | Verdict | None:
        """Run the trial's code here up to where it can enter the group. Returns what `FollowerHost.join` does."""
        assert self._follower is None, f"{self._name} is still hosting a trial"
        self._kept.stop()
        startup.imported()
        self._baseline.note_imports()
        self._spec = spec
        kwargs = dict(spec.kwargs, config=dict(spec.kwargs["config"]))
        storage = _storage(spec)
        session = _follower_session(
            spec,
            self._name,
            commits=None if storage is None else follower_commit_store(storage, self._name),
            fingerprint=fingerprint(kwargs["config"]),
        )
        self._follower = FollowerHost(session)
        return self._follower.join(trainable_cls, kwargs, spec.streams, spec.device if spec.rehearse else None)

    def enter(self, reform: Reform) -> str | Ungrowable | NotTakenIn | None:
        """Enter the group, and follow until dismissed. Returns how that ended, see `FollowerHost.enter`."""
        assert self._follower is not None
        return self._follower.enter(reform)

    # --- both

    def unload(self, fresh: str | None = None, keep: bool = False) -> str | None:
        """End the trial here, with its threads and its group; the leader of an elastic trial commits.

        ``fresh``: why the process serves no further trial, so that nothing need be put back; None: it may serve one.
        ``keep``: the trainable stays for the next trial if its class can be reset, see `kept_trainable`. Returns None
        if the worker may serve other trials, else why it must be replaced.
        """
        if self._lane is not None:
            self._lane.lift()
        try:
            return self._unload(fresh, keep and self._lane is None)
        finally:
            # The trial's memory is free by now, or this process is about to be replaced.
            lane, self._lane = self._lane, None
            if lane is not None:
                lane.leave()

    def _unload(self, fresh: str | None, keep: bool) -> str | None:
        trainable, leading, follower = self._trainable, self._session, self._follower
        self._session = self._follower = self._reports = trouble = None
        if follower is not None:
            trouble, trainable = follower.leave(), follower.trainable
        if trainable is not None:
            if leading is not None and leading.is_elastic:
                _leave_in_order(trainable, leading)  # the last commit also has the results that were reported
            self._trainable = None
            keep = keep and can_stay(trainable) and leading is not None and not leading.is_elastic
            runner = ray_trainable.training_thread()
            try:
                self._kept.keep(trainable) if keep else trainable.stop()
            except Exception as error:
                trouble = trouble or f"stop() raised {type(error).__name__}: {error}"
            if runner is not None and runner.is_alive():
                runner.join(timeout=2.0)
                if runner.is_alive():
                    trouble = trouble or "the training function did not end"
        session = leading or (None if follower is None else follower.session)
        if session is not None and trouble is None:
            session.close()
        if follower is not None:
            follower.close()
        if self._spec is not None:
            _drop_session(self._spec.emulation is not None)
        self._spec = None
        kept = keep and trainable is not None
        del trainable, session, leading, follower
        return trouble or fresh or (None if kept else self._baseline.restore())

    def end(self, within: float) -> None:
        """End this process as Python ends one: its threads are joined and its exit handlers run. Never returns.

        The process leaves Ray first. ``within``: seconds after which the kernel ends it if it has not ended by itself.
        """
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(within, 1e-3))
        with contextlib.suppress(Exception):
            self._kept.stop()
        ray.actor.exit_actor()


def _leave_in_order(trainable: Trainable, session: LeaderSession) -> None:
    """Let an elastic leader's loop run to its next boundary, where it commits and dismisses its followers."""
    session.leave()
    if isinstance(trainable, FunctionTrainable):
        ray_trainable.finish_report(timeout=5.0, busy=lambda: session.committing)
    else:
        with contextlib.suppress(Left, GroupLost):
            session.boundary(trainable.iteration)


def overrides_checkpointing(trainable_cls: type[Trainable]) -> bool:
    """Whether a class trainable saves and loads its own checkpoints. (A function shows that by reporting one.)"""
    if issubclass(trainable_cls, FunctionTrainable):
        return False
    return (
        trainable_cls.save_checkpoint is not Trainable.save_checkpoint
        and trainable_cls.load_checkpoint is not Trainable.load_checkpoint
    )


def _is_own(checkpoint: Any, spec: LoadSpec) -> bool:
    path = getattr(getattr(checkpoint, "checkpoint", None), "path", None)
    storage = spec.kwargs.get("storage")
    return path is None or storage is None or str(path).startswith(f"{storage.trial_fs_path}/")

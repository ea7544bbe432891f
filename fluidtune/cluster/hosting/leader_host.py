"""A trial's leader in its worker process: it runs the trial for Tune, one iteration at a time.

Three things are added to Ray's own `Trainable`. A trial that goes on from its last commit runs again what Tune has
already seen, without reporting it again (`result_replay`). An elastic loop finds its session (`LeaderSession`). And
calls of modules are divided among the trial's followers (`DataParallelLeader`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.tune import Trainable
from ray.tune.trainable import FunctionTrainable

from fluidtune.cluster.hosting.commit_stores import (
    delete_commits,
    fingerprint,
    insist,
    kept_commit,
    leader_commit_store,
)
from fluidtune.cluster.hosting.messages import IterationReply, LoadSpec
from fluidtune.cluster.hosting.open_runs import end_mlflow_runs
from fluidtune.cluster.hosting.result_replay import ReportedResults
from fluidtune.cluster.hosting.train_workers import TooFewDevices, TrainWorkers
from fluidtune.cluster.hosting.trial_sessions import leader_session
from fluidtune.cluster.sharing.beside import Turn
from fluidtune.cluster.sharing.gpu_probe import Probe, wait_for_device
from fluidtune.cluster.sharing.lanes import Eviction, LaneMember, LaneTicket
from fluidtune.cluster.sharing.mps import failed, verify
from fluidtune.device_kinds import KINDS
from fluidtune.elastic import BeginsAnew, Left
from fluidtune.elastic.random_streams import capture_streams, restore_streams
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat import ownership
from fluidtune.ray_compat import trainable as ray_trainable

if TYPE_CHECKING:
    from fluidtune.cluster.sharing.mps import MpsFound
    from fluidtune.elastic import LeaderSession
    from fluidtune.elastic.divided.leader import DataParallelLeader
    from fluidtune.engine.messages import Kind


def can_stay(trainable: Trainable) -> bool:
    """Whether the class can be reset for another trial. A function begins anew with each trial anyway."""
    return type(trainable).reset_config is not Trainable.reset_config and not isinstance(trainable, FunctionTrainable)


class KeptTrainable:
    """A class trainable that stays in its process between two trials, as stock Tune does it with ``reuse_actors=True``.

    It stays if the script asks for that and the class overrides ``reset_config``. The next trial of the class in the
    process gets it by ``Trainable.reset``, so that it finds what the class keeps on purpose: a data set, a connection,
    a compiled model. No object stays of a trial that shares its device by lanes, is elastic or emulated, or has failed.
    """

    def __init__(self) -> None:
        self._kept: Trainable | None = None

    def keep(self, trainable: Trainable) -> None:
        """The trial is over; the trainable stays."""
        self._kept = trainable

    def reset_for(self, trainable_cls: type[Trainable], kwargs: dict[str, Any]) -> Trainable | None:
        """The kept trainable, reset for a trial with these arguments of its constructor.

        None: there is none of this class, or its ``reset_config`` returned False. It is stopped then, and where its
        ``reset_config`` raises. (Stock Ray Tune fails the trial if ``reset_config`` returns False.)
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        others = {name: value for name, value in kwargs.items() if name != "config"}
        try:
            if type(kept) is trainable_cls and kept.reset(dict(kwargs["config"]), **others):
                return kept
        except Exception:
            with contextlib.suppress(Exception):  # what was raised first says more
                kept.stop()
            raise
        kept.stop()
        return None

    def stop(self) -> None:
        """Stop the kept trainable, if there is one: its ``cleanup`` runs."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.stop()


#: Seconds of an iteration that says none. Judgement: less than any has.
_LEAST_S = 1e-6
#: The gate of a device that is not shared by lanes.
_NO_GATE = contextlib.nullcontext()


class LeaderHost:
    """Hosts one trial's leader, from its loading to its end.

    ``kept``, ``probe``, ``mps``: what the process has for all of its trials.
    """

    def __init__(self, spec: LoadSpec, kept: KeptTrainable, probe: Probe, mps: MpsFound | None) -> None:
        self.spec = spec
        #: What `load` makes, in this order; None before.
        self.reports: ReportedResults | None = None
        self.session: LeaderSession | None = None
        #: None as well for a trial that has no followers, and on emulated devices, whose session counts them itself.
        self.division: DataParallelLeader | None = None
        self.lane: LaneMember | None = None
        #: Its place beside a service, from its first iteration on.
        self.turn: Turn | None = None
        self.trainable: Trainable | None = None
        self._train_workers = None if spec.train is None else TrainWorkers(spec.train)
        self._kept, self._probe, self._mps = kept, probe, mps
        self._has_checkpoint = self._streams_sent = False
        #: See `GroupFacts`.
        self._began_at: int | None = None
        #: It has begun an iteration; and a call of a module was divided since the last boundary.
        self._began = self._divided = False

    def load(self, trainable_cls: type[Trainable]) -> Eviction | GroupFacts:
        """Construct the trial's trainable here. What its ``setup`` raises is raised unchanged, unless a lack caused it.

        Returns what is known of the trial, or what the device lacks for it: it is not loaded then.
        """
        spec = self.spec
        ownership.place_train_runs(self._train_workers)
        kwargs = dict(spec.kwargs, config=dict(spec.kwargs["config"]))
        mark = fingerprint(kwargs["config"])
        reports = self.reports = ReportedResults(spec.delivered, mark, spec.repeats, spec.own_numbers)
        self._has_checkpoint = overrides_checkpointing(trainable_cls)
        storage = None if spec.emulation is not None else spec.kwargs.get("storage")
        resume = None if storage is None else reports.go_on_from(kept_commit(storage, spec.delivered > 0))
        streams = spec.streams if resume is None else resume.streams
        if streams is not None:
            restore_streams(streams)
        self.session = leader_session(
            spec,
            commits=None if storage is None else leader_commit_store(storage),
            resume=resume,
            streams=capture_streams(),
            fingerprint=mark,
            note=reports.note,
            rewind=reports.go_on,
            reports=reports.since,
            divided=self._was_divided,
            owner=lambda: self.trainable,
        )
        if spec.may_grow and spec.emulation is None:
            self.division = division_of(spec)
        if spec.lanes is not None:
            if self._mps is not None:
                import torch

                verify(self._mps, torch)
            self.lane = LaneMember(spec.trial, spec.lanes, spec.device)
            lack = self.lane.settle(spec.ticket)
            if lack is not None:
                return lack
        try:
            self.trainable = reports.trainable = self._kept.reset_for(trainable_cls, kwargs) or trainable_cls(**kwargs)
        except Exception as error:
            lack = self._lack_behind(error)
            if lack is None:
                raise
            return lack
        if isinstance(self.trainable, FunctionTrainable):
            ray_trainable.after_function(ray_trainable.training_thread(), end_runs)
        reports.begin()
        return self.facts()

    def facts(self) -> GroupFacts:
        """What is known of the trial now. What checks have found is told once."""
        assert self.session is not None
        facts = replace(self.session.facts(), began_at=self._began_at)
        return facts if self.division is None else self.division.facts(facts)

    def train(self, ticket: LaneTicket | None = None, stored: int = 0) -> IterationReply:
        """Run up to the next iteration that Tune has not seen, and return its result.

        ``ticket``: set if the device is shared now. ``stored``: see `ReportedResults.drop_stored`.
        """
        reports, session, trainable = self.reports, self.session, self.trainable
        assert reports is not None and session is not None and trainable is not None, "the trial was not loaded"
        reports.drop_stored(stored)
        missed = reports.next_missed()
        if missed is not None:
            return IterationReply(missed, self._kind(), seconds_of(missed), reports.reported, kept=True)
        lack = self.lane.settle(ticket) if self.lane is not None else None
        if lack is not None:
            return IterationReply({}, self._kind(), 0.0, lack=lack)
        rewritten: list[Any] = []
        while True:
            started = time.perf_counter()
            try:
                with self._gate():
                    result = self._iterate()
            except BeginsAnew as error:
                return IterationReply({}, self._kind(), 0.0, anew=str(error))
            except Exception as error:
                lack = self._lack_behind(error)
                why = session.unproved_by(error) if lack is None else None
                if lack is None and why is None:
                    raise
                return IterationReply({}, self._kind(), 0.0, anew=why, lack=lack)
            seconds = time.perf_counter() - started
            if not reports.was_seen(result):
                why = session.unproved_by(None)
                if why is None:
                    break
                return IterationReply({}, self._kind(), 0.0, anew=why)
            rewritten += self._saved_again(result)
        self._has_checkpoint = self._has_checkpoint or bool(result.get(ray_trainable.SHOULD_CHECKPOINT))
        # That a function is over is no iteration: no module need be called in it.
        facts = session.facts() if ray_trainable.RESULT_DUPLICATE in result else self.facts()
        reply = IterationReply(
            result=result,
            kind=self._kind(),
            seconds=seconds,
            iteration=reports.reported,
            facts=replace(facts, streams=None) if self._streams_sent else facts,
            saved=ray_trainable.saved_with_result(trainable, result),
            rewritten=rewritten,
        )
        self._streams_sent = facts.is_elastic
        self._note_device(reply)
        return reply

    def _saved_again(self, result: dict[str, Any]) -> list[Any]:
        """The checkpoint of an iteration that ran again, of which Tune hears nothing; empty: it has none.

        Tune saves a class after each ``saves_every`` iterations that it hears of.
        """
        trainable, every = self.trainable, self.spec.saves_every
        assert trainable is not None and self.reports is not None
        if self.reports.proves:  # Tune has newer ones
            return []
        if isinstance(trainable, FunctionTrainable):
            saved = ray_trainable.saved_with_result(trainable, result)
        else:
            saved = trainable.save() if every and trainable.iteration % every == 0 else None
        return [] if saved is None else [saved]

    def _note_device(self, reply: IterationReply) -> None:
        """Write down what the trial has needed of its device so far."""
        if self.lane is None:
            emulation = self.spec.emulation
            reply.memory = self._probe.memory_needed() if emulation is None else emulation.profile.memory
        elif self.lane.need is not None:
            reply.memory, reply.ephemeral = sum(self.lane.need), self.lane.need[1]
            reply.compute = self.lane.compute
        reply.gpu = self._probe.sample()
        if reply.gpu is not None and reply.compute is None:
            reply.compute = reply.gpu.utilisation

    def _gate(self) -> AbstractContextManager[object]:
        """What an iteration passes on a device that it shares by turns."""
        if self.spec.beside:
            # The first one imports libraries and reads data, for an unknown time: no batch waits for it.
            first, self._began = not self._began, True
            if self.turn is None:
                self.turn = Turn(self.spec.trial, served=False)
            return _NO_GATE if first else self.turn.taken()
        return self.lane.iteration() if self.lane is not None else _NO_GATE

    def _iterate(self) -> dict[str, Any]:
        """One iteration. An elastic class trainable comes to its boundary before the iteration."""
        trainable, session, reports = self.trainable, self.session, self.reports
        assert trainable is not None and session is not None and reports is not None
        self._began_at = trainable.iteration if self._began_at is None else self._began_at
        self._come_to_boundary()
        if self.division is not None:
            self.division.begin_iteration()
        result: dict[str, Any] = trainable.train()
        wait_for_device()
        self._divided = self._divided or (self.division is not None and self.division.followers.divided > 0)
        if ray_trainable.RESULT_DUPLICATE in result:
            session.ended()
        else:
            reports.keep_result(result)
        return result

    def _was_divided(self) -> bool:
        """Whether a call of a module was divided since this was asked last."""
        now = self._divided or (self.division is not None and self.division.followers.divided > 0)
        self._divided = False
        return now

    def _come_to_boundary(self) -> None:
        """Of a function it is the loop that comes to it."""
        trainable, session = self.trainable, self.session
        assert trainable is not None and session is not None
        if not isinstance(trainable, FunctionTrainable) and session.facts().is_elastic:
            session.boundary(trainable.iteration)

    def _lack_behind(self, error: Exception) -> Eviction | None:
        """What the device lacks for the trial, if that is why its code raised the error; None: it is another error."""
        few = None if self._train_workers is None else self._train_workers.lack
        if few is not None:
            return Eviction(str(few), devices=few.devices)
        broken = self._probe.broken(error)
        if broken is not None:
            return broken
        failed(self._mps, error)
        if self.lane is None:
            return self._probe.squeezed(error) if self.spec.may_be_squeezed else None
        return self.lane.failed(error)

    def _kind(self) -> Kind:
        assert self.session is not None
        if self.session.facts().is_elastic:
            return "elastic"
        return "checkpointing" if self._has_checkpoint else "plain"

    def save(self, *args: Any) -> Any:
        """Tune's ``save``. After a recovery the trial first gets back to the iteration that Tune has seen last."""
        trainable, session, reports = self.trainable, self.session, self.reports
        assert trainable is not None and session is not None and reports is not None
        is_function = isinstance(trainable, FunctionTrainable)
        while (reports.within_reach if is_function else trainable.iteration) < reports.reported:
            self._come_to_boundary()  # which may find that a class is there
            if trainable.iteration < reports.reported and ray_trainable.RESULT_DUPLICATE in self._iterate():
                break
        if reports.resume is not None and not is_function:
            if reports.proves:  # what is saved must be proved
                self._come_to_boundary()
            session.load_commit()
        if is_function and not ray_trainable.has_reported(trainable):
            return ray_trainable.TrainingResult(checkpoint=None, metrics=dict(reports.last))
        return trainable.save(*args)

    def restore(self, checkpoint: Any, again: bool = False) -> int:
        """Tune's ``restore``. The trial goes on from its own commit instead, if that is newer than the checkpoint.

        ``again``: Tune has restored the checkpoint before, in another worker. Returns how many iterations count as
        reported.
        """
        trainable, session, spec, reports = self.trainable, self.session, self.spec, self.reports
        assert trainable is not None and session is not None and reports is not None
        trainable.restore(checkpoint)
        self._has_checkpoint = True
        own = _is_own(checkpoint, spec)
        storage = spec.kwargs.get("storage")
        if own and storage is not None:  # Tune may have got it since the trial was sent
            ray_trainable.count_checkpoint(storage, checkpoint, counted=True)
        if not again and not own:
            session.forget_resume()
            if reports.state_replaced():
                insist(lambda: delete_commits(spec.kwargs["storage"]))
        elif reports.checkpoint_restored():
            session.prefer_checkpoint()
        return reports.reported

    def leave_in_order(self) -> None:
        """Let go of the followers, and let an elastic loop run to its next boundary, where it commits."""
        if self.division is not None:
            self.division.close()  # first, because what follows may take long, and the followers can serve others
        session, trainable = self.session, self.trainable
        emulated = self.spec.emulation is not None
        if trainable is None or session is None or not (emulated or session.facts().is_elastic):
            return
        session.leave()
        if emulated:
            return  # there is no commit
        if isinstance(trainable, FunctionTrainable):
            ray_trainable.finish_report(timeout=5.0, busy=lambda: session.facts().committing)
        else:
            with contextlib.suppress(Left):
                session.boundary(trainable.iteration)


def division_of(spec: LoadSpec) -> DataParallelLeader:
    """What divides the calls of modules of the trial that this process leads. It listens from now on."""
    from fluidtune.elastic.divided.leader import DataParallelLeader  # here, because an emulated trial needs none

    host = None if spec.one_node else ray.util.get_node_ip_address()
    return DataParallelLeader(spec.trial, spec.secret, host, KINDS[spec.device].torch, pickling=cloudpickle)


def seconds_of(result: Mapping[str, Any]) -> float:
    """The seconds of an iteration, by its result. A user's own ``time_this_iter_s`` may be anything."""
    seconds = result.get("time_this_iter_s")
    known = float(seconds) if isinstance(seconds, Real) else 0.0
    return known if math.isfinite(known) and known > 0 else _LEAST_S


def end_runs(error: BaseException | None) -> None:
    """A trial's function has ended. The statuses are those of Ray Tune's `MLflowLoggerCallback`.

    ``KILLED``: the function begins anew in another process, which opens another run.
    """
    interrupted = isinstance(error, (BeginsAnew, TooFewDevices))
    end_mlflow_runs("KILLED" if interrupted else "FAILED" if isinstance(error, Exception) else "FINISHED")


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

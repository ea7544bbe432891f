"""A worker: a process that hosts one trial's leader or follower.

It decides nothing. A driver loads a trial into it (`leader_host`) or attaches it to the leader of one, and unloads the
trial. Then the process ends, unless the script reuses its actors. Between Tune and
the user's code stands only Ray's own `Trainable`, so checkpoints, loggers, working directory and log files are those of
stock Tune.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import psutil
import ray

from fluidtune import elastic
from fluidtune.cluster import process_stack
from fluidtune.cluster.data.trial_parameters import fetched
from fluidtune.cluster.forks.child import is_forked
from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.cluster.hosting.leader_host import KeptTrainable, LeaderHost, can_stay
from fluidtune.cluster.hosting.messages import AttachSpec, Footprint, IterationReply, LoadSpec, WorkerInfo
from fluidtune.cluster.hosting.open_runs import end_trackers
from fluidtune.cluster.hosting.trial_resources import TrialResources
from fluidtune.cluster.hosting.trial_sessions import follower
from fluidtune.cluster.sharing.gpu_probe import Probe, free_device
from fluidtune.cluster.sharing.lanes import Eviction, LaneTicket, node_memory
from fluidtune.cluster.sharing.mps import MpsSettings, enter
from fluidtune.device_kinds import KINDS
from fluidtune.error_lines import failure
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat import ownership
from fluidtune.ray_compat import trainable as ray_trainable
from fluidtune.ray_compat.accelerators import adopt_environment, held_ids

if TYPE_CHECKING:
    from ray.tune import Trainable

    from fluidtune.cluster.emulated import EmulatedFollower
    from fluidtune.elastic.divided.follower import Follower

log = logging.getLogger(__name__)


@NeedsPlainProcess.handed_on_by
class Worker:
    """The actor class. Its methods run one after the other in the process' main thread.

    One thing: each method is one call of the driver's to the process.
    """

    def __init__(self, name: str, environment: dict[str, str], mps: MpsSettings | None = None, kind: str = "cpu"):
        self._resources = TrialResources()
        adopt_environment(self._resources.taken_of(environment))
        process_stack.watch()
        ray_trainable.get_parameters_by(fetched)
        ownership.watch()
        ray_trainable.leave_ipython_out()
        self._kind = KINDS[kind]
        self._mps = None if mps is None else enter(mps, held_ids(self._kind))
        self._name = name
        self._kept = KeptTrainable()
        self._probe: Probe = resolve_name(self._kind.probe)()
        #: The hosted trial: here is its leader, or one of its followers.
        self._leader: LeaderHost | None = None
        self._follower: Follower | EmulatedFollower | None = None
        self._spec: LoadSpec | AttachSpec | None = None

    def info(self) -> WorkerInfo:
        """Who this worker is."""
        info = WorkerInfo(os.getpid(), held_ids(self._kind), forked=is_forked())
        if self._mps is not None:
            info.mps, info.why = self._mps.client is not None, self._mps.why
        if info.gpus:
            lost = self._probe.lost()
            info.kind, info.broken = self._probe.kind(), None if lost is None else lost.reason
        return info

    # --- a trial's leader: the methods of `LeaderHost` with the same names do the work

    def load(self, trainable_cls: type[Trainable], spec: LoadSpec) -> Eviction | GroupFacts:
        assert self._leader is None or self._leader.trainable is None, f"{self._name} is still hosting a trial"
        self._spec = spec
        self._resources.take(spec.asked, spec.threads_of_device)
        self._leader = LeaderHost(spec, self._kept, self._probe, self._mps)
        return self._leader.load(trainable_cls)

    def train(self, ticket: LaneTicket | None = None, stored: int = 0) -> IterationReply:
        return self._hosted().train(ticket, stored)

    def save(self, *args: Any) -> Any:
        return self._hosted().save(*args)

    def restore(self, checkpoint: Any, again: bool = False) -> int:
        return self._hosted().restore(checkpoint, again)

    def _hosted(self) -> LeaderHost:
        assert self._leader is not None, f"{self._name} hosts no trial"
        return self._leader

    def footprint(self) -> Footprint:
        """What this process holds while its trial waits between two iterations. Memory shared with others is theirs."""
        return Footprint(psutil.Process().memory_full_info().uss, node_memory())

    def export_model(self, *args: Any, **kwargs: Any) -> Any:
        trainable = self._hosted().trainable
        assert trainable is not None
        return trainable.export_model(*args, **kwargs)

    def get_current_ip_pid(self) -> Any:
        return ray.util.get_node_ip_address(), os.getpid()

    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> Any:
        # Tune asks when a trial starts, for display; the trial may have ended before the call arrives.
        trainable = None if self._leader is None else self._leader.trainable
        return trainable.get_auto_filled_metrics(*args, **kwargs) if trainable is not None else {}

    # --- a follower: it computes parts of what the leader's modules are called with, and has nothing of the script

    def attach(self, spec: AttachSpec) -> str | None:
        """Attach this process to the leader. Returns why that cannot be; None: it is attached."""
        assert self._follower is None and self._leader is None, f"{self._name} is still hosting a trial"
        self._kept.stop()
        self._spec = spec
        made = follower(spec, self._name)
        try:
            made.attach(spec.address)
        except Exception as error:
            made.close()
            return str(error) or repr(error)
        self._follower = made
        return None

    def follow(self) -> str | Eviction | None:
        """Serve the leader until that is over. Returns an error of the follower's own; None: there was none.

        An `Eviction` says that the device has failed.
        """
        if self._follower is None or not isinstance(self._spec, AttachSpec):
            return None
        try:
            self._follower.run()
        except Exception as error:
            return self._probe.broken(error) or repr(error)
        return None

    # --- both

    def unload(self, keep: bool = False) -> bool:
        """End the trial here; the leader of an elastic trial commits. Returns whether the process may serve another.

        ``keep``: it may, as the script says ``reuse_actors=True``. Nothing of it is put back then, as under stock Tune,
        and the trainable stays for the next trial if its class can be reset, see `KeptTrainable`. A process that stands
        for an emulated device may always.
        """
        lane, turn = (None, None) if self._leader is None else (self._leader.lane, self._leader.turn)
        shares = lane or turn
        if lane is not None:
            lane.lift()
        try:
            return self._unload(keep and lane is None)
        finally:
            # Another trial may have the device from now on, before this process has ended.
            free_device()
            if shares is not None:
                shares.leave()

    def _unload(self, keep: bool) -> bool:
        leader, follower = self._leader, self._follower
        self._leader = self._follower = None
        trainable = None if leader is None else leader.trainable
        leading = None if leader is None else leader.session
        if follower is not None:
            follower.close()
        if leader is not None:
            leader.leave_in_order()  # the last commit also has the results that were reported
        emulated = self._spec is not None and self._spec.emulation is not None
        ended = True
        if trainable is not None:
            stays = keep and not emulated and can_stay(trainable)
            stays = stays and leading is not None and not leading.facts().is_elastic
            runner = ray_trainable.training_thread()
            try:
                self._kept.keep(trainable) if stays else trainable.stop()
            except Exception as error:
                log.warning("trial %s: stop() raised %s", self._spec and self._spec.trial, failure(error))
                ended = False
            if runner is not None and runner.is_alive():
                runner.join(timeout=2.0)
                ended = ended and not runner.is_alive()
        if leading is not None and ended:
            leading.close()
        elastic.use(None)
        self._spec = None
        again = ended and (keep or emulated)
        if not again:
            ownership.end_owned()
        return again

    def end(self, within: float) -> None:
        """End this process as Python ends one: its threads are joined and its exit handlers run. Never returns.

        The process leaves Ray first. ``within``: seconds after which the kernel ends it if it has not ended by itself.
        """
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(within, 1e-3))
        with contextlib.suppress(Exception):
            self._kept.stop()
        if self._follower is not None:
            with contextlib.suppress(Exception):
                self._follower.close()
        end_trackers()
        with contextlib.suppress(Exception):
            ownership.end_owned()
        ray.actor.exit_actor()

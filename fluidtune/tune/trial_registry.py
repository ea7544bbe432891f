"""What is known of a job's trials before they run: what they ask for, their kind, their group and their trainable.

It makes the events with which a trial arrives at the engine. Which group a trial is in is the adapter's decision
(`fluidtune.tune.groups`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import ray
from ray.tune import PlacementGroupFactory
from ray.tune.experiment import Trial
from ray.tune.trainable import FunctionTrainable

from fluidtune.cluster.devices.layout import refusal
from fluidtune.cluster.emulated.paced_trainable import paced
from fluidtune.cluster.hosting.leader_host import overrides_checkpointing
from fluidtune.device_kinds import by_resource
from fluidtune.engine import Reason, Why, because
from fluidtune.engine import messages as m
from fluidtune.trials.messages import TrainableCapabilities
from fluidtune.tune.device_setup import DeviceSetup
from fluidtune.tune.trial_run import TrialRun

logger = logging.getLogger(__name__)


def is_one_bundle(request: PlacementGroupFactory) -> bool:
    """Whether one process is all that a trial asks for, wherever its resources are.

    A request may also say more to Ray's ``placement_group``, as by labels which node is meant.
    """
    return len(request.bundles) == 1 and request == PlacementGroupFactory(request.bundles, strategy=request.strategy)


#: Characters of a parameter's value in the event log, as of a line that people read.
VALUE_LENGTH = 100


def parameters_of(trial: Trial) -> dict[str, Any]:
    """What the search chose for the trial, with the values that it has now: PBT changes them."""
    found: dict[str, Any] = {}
    for name, chosen in (trial.evaluated_params or {}).items():
        now: Any = trial.config
        for part in str(name).split("/"):  # as Tune names one in another; each may be a mapping
            now = now.get(part, chosen) if isinstance(now, Mapping) else chosen
        plain = now is None or isinstance(now, Real)
        found[str(name)] = now if plain else str(now)[:VALUE_LENGTH]
    return found


class TrialRegistry:
    """The trials of one job. ``request``: what the run's first trial has asked for, in a restored run as well.

    One thing: what one trial shows, its kind or its gang, holds for the others of its trainable.

    ``concurrency``: how many trials the script wants in flight; None: it does not say.
    """

    def __init__(self, scheduler: Any, setup: DeviceSetup, request: dict[str, float], concurrency: int | None):
        self._scheduler = scheduler
        self._setup = setup
        self._request = request
        self._concurrency = concurrency
        #: Every trial that Tune has made, by its id.
        self.known: dict[str, Trial] = {}
        #: Groups that the engine knows -> the rungs that follow each; see `fluidtune.tune.groups.Membership`.
        self.rungs: dict[str, tuple[tuple[int, float], ...]] = {}
        #: Trainable class -> its reference in Ray's object store.
        self._references: dict[Any, Any] = {}
        #: Name of a trainable -> what its trials have shown.
        self._shown: dict[str, TrainableCapabilities] = {}

    # --- what a trial asks for

    def is_left_to_ray(self, trial: Trial) -> bool:
        """Whether Ray runs a later trial, as under stock Tune: it asks for what only Ray can place, as several bundles.

        A job that holds devices all the time may hold those that Ray would need, so there such a trial is refused.
        """
        request = trial.placement_group_factory
        if is_one_bundle(request) or not self._scheduler.executor.on_demand:
            return False
        why = because(Reason.SEVERAL_BUNDLES, resource=str(request))
        logger.warning("FluidTune: Ray Tune runs trial %s: %s", trial.trial_id, why.words)
        return True

    def refusal(self, trial: Trial) -> Why | None:
        """Why no worker of the job can host a later trial; None: one can.

        It may ask for more devices than the first one, but not for a resource that the workers lack: they are made for
        the first trial's request.
        """
        request = trial.placement_group_factory
        if not is_one_bundle(request):
            # With devices on demand, it asked for one when Tune made it: otherwise Ray runs it.
            return because(Reason.SEVERAL_BUNDLES, resource=str(request))
        known, own = by_resource(), self._setup.kind
        for name, amount in request.bundles[0].items():
            first = self._request.get(name, 0.0)
            lacks = amount > first
            if amount and name in known:
                bundle, said = self._setup.layout.bundle, self._scheduler.executor.devices
                lacks = own.cores and name not in bundle if known[name].cores else not first and said is None
            if lacks:
                return because(Reason.RESOURCE_LACKING, asked=amount, first=first, resource=name)
        most, gang = self._setup.layout.most or math.inf, max(1.0, self._setup.layout.share)
        node = math.inf if self._setup.on_one_node is None else max(1, self._setup.on_one_node)
        noun, leased = "device" if own.cores else own.noun, gang if self._setup.leased else math.inf
        return refusal(self.share_of(trial), noun, most, node, leased)

    def share_of(self, trial: Trial) -> float:
        """The part of one device that the trial asks for, or a whole number of devices."""
        return max(self._own_share(trial), self.shown_by(trial).devices)

    def _own_share(self, trial: Trial) -> float:
        """That of the trial's own process."""
        return self._setup.layout.share_of(trial.placement_group_factory.bundles[0])

    def is_over_cores(self, trial: Trial) -> bool:
        """Whether the trial's one process has the cores of several devices."""
        return self._setup.kind.cores and self._own_share(trial) > 1

    # --- groups

    def arrival_events(self, run: TrialRun) -> list[m.Event]:
        """The events for the engine when Tune wants this trial to run."""
        trial = run.trial
        member = self._scheduler.membership(trial)
        events: list[m.Event] = []
        if member.group not in self.rungs:
            concurrency = None if member.synchronous else self._concurrency
            events.append(m.GroupAnnounced(member.group, member.synchronous, concurrency, member.tail))
        self.rungs[member.group] = member.rungs
        left, share, shown = run.life.iterations_to(member.target), self.share_of(trial), self.shown_by(trial)
        kind, growable = shown.kind or "plain", shown.growable
        traits = tuple((name, repr(value)) for name, value in (trial.evaluated_params or {}).items())
        events.append(m.TrialAdded(trial.trial_id, member.group, kind, left, share, traits, growable, member.turn))
        return events

    def promoted_in_place(self, known: str, group: str) -> None:
        """A trial of the group ``known`` was promoted into ``group`` without a pause.

        The engine keeps it in ``known``. The rungs after ``known`` follow ``group`` from now on, and are counted there
        alone.
        """
        if known != group:
            self.rungs[known] = ()

    # --- kinds and trainables

    def trainable_ref(self, trial: Trial) -> Any:
        """The trial's trainable in Ray's object store, put there once."""
        trainable = trial.get_trainable_cls()
        if trainable not in self._references:
            emulated = self._setup.emulation and paced(trainable, self._setup.emulation)
            self._references[trainable] = ray.put(emulated or trainable)
        return self._references[trainable]

    def shown_by(self, trial: Trial) -> TrainableCapabilities:
        """What trials of its trainable have shown so far. Later ones are taken to be of the same kind."""
        return self._shown.get(trial.trainable_name, TrainableCapabilities())

    def learn(self, trial: Trial, new: TrainableCapabilities) -> TrainableCapabilities:
        """The trial has shown this. Returns it, with as many devices as any of its trainable has needed."""
        known = self.shown_by(trial)
        new = replace(new, devices=new.devices and max(new.devices, known.devices))
        both = TrainableCapabilities(
            new.kind or known.kind, new.growable or known.growable, new.devices or known.devices
        )
        self._shown[trial.trainable_name] = both
        return new

    def can_save(self, trial: Trial) -> bool:
        """Whether the trial can be asked for a checkpoint at any iteration."""
        trainable = trial.get_trainable_cls()
        return not issubclass(trainable, FunctionTrainable) and overrides_checkpointing(trainable)

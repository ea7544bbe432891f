"""What a worker is told of its trial: how to load it, how to follow its leader, and which lane it has."""

from __future__ import annotations

from collections.abc import Sequence

from fluidtune.cluster.hosting.messages import AttachSpec, LoadSpec
from fluidtune.cluster.hosting.train_workers import TrainRoom
from fluidtune.cluster.sharing.lanes import LaneTicket
from fluidtune.tune.trial_run import TrialRun
from fluidtune.tune.tuning_job import TuningJob


def load_spec(job: TuningJob, run: TrialRun) -> LoadSpec:
    """What a worker needs to host the trial."""
    life, setup = run.life, job.setup
    kwargs = dict(run.kwargs, storage=run.trial.storage) if "storage" in run.kwargs else run.kwargs
    return LoadSpec(
        trial=run.id,
        kwargs=kwargs,
        delivered=life.seen.delivered,
        saves_every=run.trial.checkpoint_freq,
        repeats=life.seen.retried,
        own_numbers=life.seen.own_numbers,
        device=setup.layout.kind,
        emulation=setup.emulation,
        streams=life.streams,
        lanes=setup.lane_settings(life.crew.devices[0]),
        ticket=lane_ticket(job, run),
        secret=run.secret,
        one_node=job.on_one_node(),
        may_grow=not life.gang and job.settings.max_workers != 1,
        may_be_squeezed=setup.shares_gpus_by_count and not life.squeezed,
        beside=job.settings.beside,
        asked={name: float(amount) for name, amount in run.trial.placement_group_factory.bundles[0].items()},
        threads_of_device=setup.layout.process_threads if job.trials.is_over_cores(run.trial) else None,
        train=_train_room(job, life.crew.devices),
    )


def attach_spec(job: TuningJob, run: TrialRun) -> AttachSpec:
    """What a worker needs to follow the trial's leader."""
    setup = job.setup
    return AttachSpec(run.id, run.life.crew.facts.address, run.secret, setup.layout.kind, setup.emulation)


def _train_room(job: TuningJob, devices: Sequence[int]) -> TrainRoom | None:
    """What a trial on these devices has for workers of Ray Train. The arbiter leases none for them."""
    layout, held = job.setup.layout, job.devices
    if job.setup.leased or not held.nodes.keys() >= set(devices):
        return None  # or the trial is about to lose one of its devices
    places = tuple((held.group(each), held.bundle(each)) for each in devices if job.setup.kind.computes)
    return TrainRoom(layout.worker, layout.bundle, len(devices), layout.most, places)


def lane_ticket(job: TuningJob, run: TrialRun) -> LaneTicket | None:
    """The trial's lane on the device that it shares; None while it has the device alone."""
    place = None if job.setup.lanes is None else job.engine.place_in_lanes(run.id)
    if place is None:
        return None
    view = job.engine.trial(run.id)
    return LaneTicket(place.lane, (float(place.persistent), float(place.ephemeral)), view.height, view.rung)

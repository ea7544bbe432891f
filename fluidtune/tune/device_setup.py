"""How one job's devices are cut, shared and held.

Decided once, when the job begins, from the settings and from what the job's first trial asks for.
"""

from __future__ import annotations

import glob
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import ray

from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.layout import DeviceSpec, Layout, devices_held, lack, layout
from fluidtune.cluster.devices.on_demand_devices import OnDemandDevices, Uses
from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.cluster.emulated.paced_trainable import Emulation
from fluidtune.cluster.sharing.lanes import LaneSettings
from fluidtune.cluster.sharing.mps import MpsSettings
from fluidtune.device_kinds import KINDS, DeviceKind, asked_for, by_resource
from fluidtune.engine import DeviceDemand, with_arrivals
from fluidtune.engine.packing_search import SEARCH_LIMIT
from fluidtune.errors import FluidTuneError
from fluidtune.profiles import DEVICES_PER_NODE
from fluidtune.ray_compat.cluster_state import may_get_nodes
from fluidtune.ray_compat.controller import pending_trials_said
from fluidtune.ray_compat.job_metadata import user_of_job
from salus_share.seat_table import home

if TYPE_CHECKING:
    from fluidtune.tune.executor import FluidExecutor
    from fluidtune.tune.tuning_job import TuningJob

logger = logging.getLogger(__name__)

#: The most placement groups of a job that wait at a time, unless TUNE_MAX_PENDING_TRIALS_PG or the size of the cluster
#: says otherwise: the least that Ray Tune's TuneController lets wait (``min_autoscaling_rate``, Ray 2.44 to 2.60).
PENDING_GROUPS = 200


@dataclass(frozen=True)
class DeviceSetup:
    """See the module. ``job``: the job's name."""

    job: str
    layout: Layout
    #: c, the packing limit, as the engine is given it: None has the engine search for it.
    max_packing: int | None
    #: How many trials of an asynchronous group may share a device for the sake of the group's concurrency.
    concurrent_packing: int
    #: Devices that the job may hold at most; None: any number.
    most_devices: int | None
    #: The policy under which several trials share a device; None: they share it by count alone, or never.
    lanes: str | None
    #: Bytes that the trials of one device may use together, with lanes; None: what the device has.
    device_memory: int | None
    #: Set for emulated devices.
    emulation: Emulation | None
    #: The cluster had one node when the job began.
    one_node: bool = False
    #: The devices are leases of the arbiter.
    leased: bool = False
    #: The most devices that a trial can get, which are those of one node; see `devices_of_one_node`.
    on_one_node: int | None = None

    @property
    def kind(self) -> DeviceKind:
        """What holds for all devices of the job."""
        return KINDS[self.layout.kind]

    @property
    def shares_gpus_by_count(self) -> bool:
        """Whether several trials may be on one GPU whose memory is not divided among them."""
        own_memory = self.kind.computes and not self.kind.cores
        return own_memory and self.lanes is None and self.layout.packing > 1

    @property
    def mps(self) -> MpsSettings | None:
        """How processes of one GPU share it under MPS; None: without MPS."""
        under_mps = self.lanes is not None and self.kind.mps
        return MpsSettings(self.device_memory) if under_mps else None

    def shown_nodes(self, came: Mapping[int, str]) -> Mapping[int, str]:
        """The node of each device, as the engine and the event log get it.

        Emulated devices are on emulated nodes, whatever real node their workers run on. Leased ones are where the
        arbiter says, because it leases the devices of one node to a trial that needs several.
        """
        if self.emulation is None or self.leased:
            return came
        return {device: f"emulated-{device // DEVICES_PER_NODE}" for device in came}

    def lane_settings(self, device: int) -> LaneSettings | None:
        """How the trials of this device share it; None: not by lanes."""
        if self.lanes is None:
            return None
        cores = self.layout.bundle.get("CPU", 1.0)
        return LaneSettings(f"{self._lanes}{device}", self.lanes, self.device_memory, cores, self.layout.packing)

    @property
    def _lanes(self) -> str:
        return f"fluidtune-{self.job}-"

    def remove_files(self) -> None:
        """Remove what the emulation and the lanes left on this node's disk."""
        if self.emulation is not None:
            shutil.rmtree(self.emulation.board, ignore_errors=True)
        if self.lanes is not None:
            for path in home(f"{self._lanes}0").parent.glob(glob.escape(self._lanes) + "*"):
                # On other nodes an empty lock file is left for each device, and the table of one that was killed.
                shutil.rmtree(path, ignore_errors=True)


def set_up_devices(
    job: str, settings: FluidExecutor, request: dict[str, float], concurrency: int | None, synchronous: bool
) -> DeviceSetup:
    """Work out how the job's devices are cut and shared.

    Args:
        job: the job's name.
        settings: the user's.
        request: the resources that the job's first trial asks for.
        concurrency: how many trials the script wants in flight; None: it does not say.
        synchronous: the algorithm's groups are batches whose makespan counts.

    Raises:
        FluidTuneError: no cluster could hold such a device; or this one cannot, and the devices are to be reserved.
    """
    spec = DeviceSpec.parse(settings.devices)
    on_cores = KINDS[asked_for(request) if spec is None else spec.kind].cores
    # Two trials on one core take turns, so there is no better packing limit to search for.
    search = settings.max_packing is None and not on_cores
    # A script may want more trials in flight than there are cores; these then share cores. A trial on GPUs says itself
    # what part of a GPU it asks for.
    packs = settings.max_packing is None and on_cores and not synchronous
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    plan = layout(
        spec,
        request,
        ray.cluster_resources(),
        max_packing=SEARCH_LIMIT if search else settings.max_packing or 1,
        concurrency=concurrency if packs else None,
        leased=settings.arbiter is not None,
        on_demand=settings.on_demand,
        searched=search,
        nodes=nodes,
    )
    if settings.on_demand:
        _refuse_hopeless(settings.devices, plan)
        _warn_of_waiting(plan, request, nodes)
    emulation = None
    if not KINDS[plan.kind].computes:
        board = OccupancyBoard.of_this_driver()
        emulation = Emulation(settings.emulated_profile(), board, os.geteuid())
    return DeviceSetup(
        job=job,
        layout=plan,
        max_packing=None if search else min(settings.max_packing or 1, plan.packing),
        concurrent_packing=plan.packing if packs else 1,
        most_devices=plan.most if spec and spec.count else None,
        lanes=settings.lanes if plan.packing > 1 else None,
        device_memory=settings.device_memory,
        emulation=emulation,
        one_node=len(nodes) == 1,
        leased=settings.arbiter is not None,
        on_one_node=devices_of_one_node(settings, plan, nodes),
    )


def devices_of_one_node(settings: FluidExecutor, plan: Layout, nodes: Sequence[Mapping[str, float]]) -> int | None:
    """How many of a job's devices one node has at most; None: nodes may come, or the arbiter knows.

    ``nodes``: the total resources of every node.
    """
    if settings.on_demand or settings.arbiter is not None:
        return None
    if not KINDS[plan.kind].computes:
        return DEVICES_PER_NODE  # see `DeviceSetup.shown_nodes`
    return max(devices_held(plan.bundle, node) for node in nodes)


def _refuse_hopeless(setting: str | None, plan: Layout) -> None:
    """FluidTuneError if the user's ``setting`` asks for more than cores, and the cluster has not and gets none.

    A trial whose own request no node can hold waits, as under stock Ray Tune.
    """
    cluster, kind = ray.cluster_resources(), KINDS[plan.kind]
    needed, there = max(1, math.ceil(plan.share)), int(cluster.get(kind.resource, 0))
    if setting is None or kind.cores or there >= needed or may_get_nodes():
        return
    trial = f"a trial needs {needed} of them, and the" if needed > 1 else "the"
    raise FluidTuneError(
        f"devices={setting!r} asks for {kind.noun}s; {trial} Ray cluster has {there or 'none'}, "
        f"{cluster.get('CPU', 0):g} CPUs, and no autoscaler that could bring some; "
        f'leave devices out or use "cpu", or start Ray with {kind.noun}s'
    )


def _warn_of_waiting(plan: Layout, request: dict[str, float], nodes: list[dict[str, float]]) -> None:
    """Say what the job waits for, as Ray does where an autoscaler may bring it."""
    lacking = lack(request if plan.share > 1 else plan.bundle, nodes)
    there = sum(devices_held(plan.bundle, node) for node in nodes)
    if lacking is not None:
        logger.warning(
            "FluidTune: %s; its trials wait until the cluster, which has %s, gets such a node",
            lacking,
            " and ".join(f"{sum(node.get(name, 0.0) for node in nodes):g} {name}s" for name in sorted(by_resource())),
        )
    elif plan.most is not None and plan.most > there:
        logger.warning(
            "FluidTune: the job may have %d devices, and the Ray cluster has %d; it uses these, and others that come",
            plan.most,
            there,
        )


def most_pending_groups(pending: int) -> int:
    """How many placement groups of the job may wait at a time. ``pending``: how many trials Tune lets be pending.

    A searcher that suggests trials one by one has ``pending`` 1, and FluidTune raises that while processes start. So
    the number of trials that wait limits the groups in such a job; this is only the limit for a whole rung that waits.
    """
    return pending if pending_trials_said() else max(pending, PENDING_GROUPS)


def hold_devices(job: TuningJob, settings: FluidExecutor, app: str, pending: int) -> DeviceSource:
    """Get the job's devices on demand, reserve them, or ask the arbiter for leases under the name ``app``.

    ``pending``: how many trials Tune lets be pending, and so how many placement groups wait at a time at most.

    Raises:
        FluidTuneError: the arbiter cannot lease such a device, or has an app of that name.
    """
    setup, engine = job.setup, job.engine
    gang = max(1, int(setup.layout.share))

    if settings.arbiter is None:
        most = setup.layout.most or 0

        def demand(room: int) -> DeviceDemand:
            if not settings.on_demand:
                return DeviceDemand({1: most})
            if not engine.knows_trials and not job.newcomers:
                return DeviceDemand({gang: 1})  # Tune is about to ask for the first trial
            return with_arrivals(engine.demand(room), job.newcomers)

        def held(device: int) -> bool:
            return device in source.broken or job.is_in_use(device)

        def known(device: int) -> bool:
            return device in source.broken or engine.has_device(device)

        def waiting() -> int:
            return engine.waiting_count + len(job.newcomers)

        uses = Uses(demand, waiting, held, known, lambda device: job.pool.has_worker(device))
        source = OnDemandDevices(setup.job, setup.layout, uses, pending if settings.on_demand else most)
        return source
    # Here and not above: a job that holds devices of its own needs neither Themis nor its solver.
    from fluidtune.cluster.devices.leased_devices import LeasedDevices
    from fluidtune.tune.arbiter_progress import JobProgress
    from themis_bridge.shell.tenant import Tenant

    work = JobProgress(engine, job.trials.rungs.__getitem__, setup.most_devices, gang)

    def leased_in_use(device: int) -> bool:
        return device not in leased.broken and job.is_in_use(device)

    leased = LeasedDevices(setup.layout, work, leased_in_use, partial(Tenant, app, user=user_of_job(settings.user)))
    return leased

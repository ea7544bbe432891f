"""How one job's devices are cut, shared and held.

Decided once, when the job begins, from the settings and from what the job's first trial asks for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from fluidtune.cluster.device_source import DeviceSource
from fluidtune.cluster.devices import DeviceSpec, Layout, Reservation, layout
from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.cluster.emulated.paced_trainable import Emulation
from fluidtune.cluster.lanes import LaneSettings
from fluidtune.cluster.mps import MpsSettings
from fluidtune.engine import Engine
from fluidtune.engine.packing_search import SEARCH_LIMIT
from fluidtune.profiles import DEVICES_PER_NODE
from salus_share.seat_table import home

if TYPE_CHECKING:
    from fluidtune.tune.executor import FluidExecutor
    from fluidtune.tune.trial_registry import TrialRegistry


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

    @property
    def torch_device(self) -> str:
        """torch's name of the kind of device."""
        return "cuda" if self.layout.kind == "gpu" else "cpu"

    @property
    def mps(self) -> MpsSettings | None:
        """How processes of one GPU share it under MPS; None: without MPS."""
        under_mps = self.lanes is not None and self.layout.kind == "gpu"
        return MpsSettings(self.device_memory) if under_mps else None

    def shown_nodes(self, came: Mapping[int, str]) -> Mapping[int, str]:
        """The node of each device, as the engine and the event log are told.

        Emulated devices are on emulated nodes, whatever real node their workers run on.
        """
        if self.emulation is None:
            return came
        return {device: f"emulated-{device // DEVICES_PER_NODE}" for device in came}

    def lane_settings(self, device: int) -> LaneSettings | None:
        """How the trials of this device share it; None: not by lanes."""
        if self.lanes is None:
            return None
        cores = self.layout.bundle.get("CPU", 1.0)
        return LaneSettings(self._lanes_of(device), self.lanes, self.device_memory, cores, self.layout.packing)

    def _lanes_of(self, device: int) -> str:
        return f"fluidtune-{self.job}-{device}"

    def remove_files(self) -> None:
        """Remove what the emulation and the lane services left on this node's disk."""
        if self.emulation is not None:
            os.unlink(self.emulation.board)
        if self.lanes is not None:
            for device in range(self.layout.count):
                # On other nodes the lane services leave a log and two empty lock files.
                shutil.rmtree(home(self._lanes_of(device)), ignore_errors=True)


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
        FluidTuneError: the cluster cannot hold such a device.
    """
    spec = DeviceSpec.parse(settings.devices)
    on_cores = "GPU" not in request if spec is None else spec.kind == "cpu"
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
        nodes=nodes,
    )
    return DeviceSetup(
        job=job,
        layout=plan,
        max_packing=None if search else min(settings.max_packing or 1, plan.packing),
        concurrent_packing=plan.packing if packs else 1,
        most_devices=plan.count if spec and spec.count else None,
        lanes=settings.lanes if plan.packing > 1 else None,
        device_memory=settings.device_memory,
        emulation=_emulation(settings, plan.count) if plan.kind == "emulated" else None,
        one_node=len(nodes) == 1,
    )


def hold_devices(
    setup: DeviceSetup,
    settings: FluidExecutor,
    app: str,
    engine: Engine,
    trials: TrialRegistry,
    in_use: Callable[[int], bool],
) -> DeviceSource:
    """Reserve the job's devices, or ask the arbiter for leases under the name ``app``.

    ``engine`` and ``trials`` say what work is left, ``in_use`` whether anything of the job runs on a device.

    Raises:
        FluidTuneError: the arbiter cannot lease such a device, or has an app of that name.
    """
    if settings.arbiter is None:
        return Reservation(setup.layout)
    # Here and not above: a job that holds devices of its own needs neither Themis nor its solver.
    from fluidtune.tune.leased_devices import LeasedDevices, Progress

    work = Progress(lambda: engine, trials.rungs_after, settings.max_workers, setup.most_devices)
    return LeasedDevices(setup.layout, app, work, in_use)


def _emulation(settings: FluidExecutor, devices: int) -> Emulation:
    """The profile, and an occupancy board of this job's own."""
    descriptor, path = tempfile.mkstemp(prefix="fluidtune-emulated-")
    os.close(descriptor)
    OccupancyBoard.create(path, devices)
    return Emulation(settings.emulated_profile(), path, os.geteuid())

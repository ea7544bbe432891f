"""What a device is for a job, and how the job's devices are held.

A job asks for `gpu` devices (whole GPUs) or `cpu` ones (one worker's cores each). Every device is a placement
group of one bundle: other Ray jobs see it taken, its workers run inside it, and removing it kills them. What
a trial does on a device is not decided here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from fluidtune.errors import FluidTuneError

_SPEC = re.compile(r"(cpu|gpu|emulated)(?::(\d+))?")
#: What an emulated worker takes of the real cluster, CPUs: next to nothing, it sleeps.
EMULATED_CPUS = 0.001
#: Seconds that a job's start waits for each further device once the first is there. Judgement: a group that is not
#: created by then has no room now, and `Reservation.poll` finds it when it comes.
OTHER_GROUPS_WAIT_S = 0.1


@dataclass(frozen=True)
class DeviceSpec:
    """``kind`` "cpu", "gpu" or "emulated"; ``count`` how many the job takes, None for all of the cluster's."""

    kind: str
    count: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> DeviceSpec | None:
        """Read "cpu", "cpu:4", "gpu:2" or "emulated:8"; None (the user left it to us) stays None."""
        if text is None:
            return None
        match = _SPEC.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[2] == "0" or match[0] == "emulated":
            raise FluidTuneError(
                f'devices={text!r} is not a device setting; use "gpu", "gpu:N", "cpu", "cpu:N" or "emulated:N" '
                "with N >= 1, or leave it out to take what the script's trials ask for"
            )
        return cls(match[1], int(match[2]) if match[2] else None)


@dataclass(frozen=True)
class Layout:
    """How a job's trials sit on its devices, derived from what the script asks for one trial.

    ``bundle``: resources of one device. ``share``: what one trial asks of one device (1.0, less, or several
    whole ones). ``packing``: how many workers one device may hold. ``worker``: resources of one worker.
    """

    kind: str
    count: int
    bundle: dict[str, float]
    share: float
    packing: int
    worker: dict[str, float]

    def share_of(self, request: Mapping[str, float]) -> float:
        """What a trial with a request of its own asks of one device.

        Devices and workers are cut to the job's first trial: one that asks for less gets as much as that one.
        """
        asked = float(request.get("CPU" if self.kind == "cpu" else "GPU", 0.0))
        if self.kind == "cpu":
            cores = self.bundle.get("CPU", 1.0)
            share = asked / cores if asked <= cores else math.ceil(asked / cores)
        else:
            share = asked
        return max(self.share, share)


def layout(
    spec: DeviceSpec | None,
    request: Mapping[str, float],
    cluster: Mapping[str, float],
    *,
    max_packing: int,
    concurrency: int | None = None,
    leased: bool = False,
    nodes: Sequence[Mapping[str, float]] = (),
) -> Layout:
    """Work out a job's devices from its trials' request.

    Args:
        spec: the user's setting, None to follow the request: a trial that asks for GPUs runs on GPUs.
        request: the resources of one trial, one bundle, Ray's names ("CPU", "GPU", custom ones).
        cluster: the cluster's total resources.
        max_packing: the executor's c.
        concurrency: how many trials the script wants in flight, if it says so.
        leased: devices are leases of whole GPUs or cores; emulated ones then stand for GPUs that Ray believes to have.
        nodes: the total resources of every node, () for a cluster of one. Fewer workers share a device where the nodes
            could not hold all devices else.

    Raises:
        FluidTuneError: the cluster cannot hold it.
    """
    gpus, cpus = float(request.get("GPU", 0.0)), float(request.get("CPU", 0.0))
    if spec is None:
        spec = DeviceSpec("gpu" if gpus > 0 else "cpu")
    extra = {k: float(v) for k, v in request.items() if k not in ("CPU", "GPU") and v}
    for name, amount in extra.items():
        if amount > cluster.get(name, 0.0):
            raise FluidTuneError(
                f"a trial asks for {amount:g} of the resource {name!r}, the Ray cluster has {cluster.get(name, 0):g}; "
                "ask for less, or start Ray with it"
            )
    if spec.kind != "cpu":
        free = spec.count if spec.kind == "emulated" and not leased else None
        there = free or int(cluster.get("GPU", 0))
        _enough(spec, there, "GPU")
        if 1 < gpus != int(gpus):
            raise FluidTuneError(f"a trial asks for {gpus:g} GPUs; ask for a whole number or for 1 or less")
        share = gpus or 1.0
        count = spec.count or there
        if share > count:
            raise FluidTuneError(
                f"a trial asks for {gpus:g} GPUs, the job has {count}; "
                "ask for fewer GPUs per trial or give the job more devices"
            )
    else:
        there = int(cluster.get("CPU", 0))
        _enough(spec, there, "CPU")
        cores = max(1.0, cpus)
        share = cpus if 0 < cpus < 1 else 1.0
        count = int((spec.count or there) // cores)
        if count < 1:
            raise FluidTuneError(
                f"a trial asks for {cpus:g} CPUs, the job has {spec.count or there}; "
                "ask for fewer CPUs per trial or give the job more devices"
            )
    packing = max(max_packing, int(1 / share) if share < 1 else 1)
    if concurrency is not None:
        packing = max(packing, -(-concurrency // count))
    if share > 1:
        packing = 1
    # What every worker brings to its device, and what the device has however many there are. A trial over several
    # GPUs is one process: what it asks for is divided over the devices that it holds.
    over = max(share, 1.0)
    each, fixed = {k: v / over for k, v in extra.items()}, {}
    if spec.kind == "emulated":
        each["CPU"], fixed["GPU"] = EMULATED_CPUS, 1.0 if leased else 0.0
    elif spec.kind == "gpu":
        each["CPU"], fixed["GPU"] = cpus / over, 1.0
    else:
        fixed["CPU"] = cores

    def bundle(workers: int) -> dict[str, float]:
        return {k: v for k, v in {**{k: v * workers for k, v in each.items()}, **fixed}.items() if v}

    nodes = nodes or [cluster]
    room = [_held(bundle(1), node) for node in nodes]
    if max(room) < over:
        asked = ", ".join(f"{v:g} {k}" for k, v in request.items() if v)
        raise FluidTuneError(
            f"a trial asks for {asked}, and no node of the Ray cluster has that; ask for less, or start Ray with it"
        )
    # A device that no node can hold would wait for ever.
    while sum(_held(bundle(packing), node) for node in nodes) < min(count, sum(room)):
        packing -= 1
    if share < 1:
        share = max(share, 1 / packing)
    worker = dict(each) if spec.kind == "emulated" else {**each, **{k: v / packing for k, v in fixed.items()}}
    return Layout(
        kind=spec.kind,
        count=count,
        bundle=bundle(packing),
        share=share,
        packing=packing,
        worker={k: v for k, v in worker.items() if v},
    )


def _held(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How many devices of this bundle a node can hold."""
    return int(min(node.get(name, 0.0) / amount + 1e-9 for name, amount in bundle.items()))


def _enough(spec: DeviceSpec, there: int, name: str) -> None:
    if (spec.count or 1) > there:
        wanted = f'devices="{spec.kind}:{spec.count}"' if spec.count else f'devices="{spec.kind}"'
        raise FluidTuneError(
            f"{wanted} asks for {spec.count or 1} {name}s, the Ray cluster has {there}; "
            f"ask for at most {there}" + ("" if there else f" (start Ray where it sees {name}s)")
        )


class Reservation:
    """A `DeviceSource` of the job's own: it reserves every device with a placement group for the whole run.

    A device is there when its group has been created on a living node.
    """

    def __init__(self, plan: Layout):
        #: Every device's placement group, whether the device is there or not.
        self._groups: dict[int, PlacementGroup] = {
            device: placement_group([dict(plan.bundle)], strategy="PACK", name=f"fluidtune-device-{device}")
            for device in range(plan.count)
        }
        #: The devices that are there, each with its node's id.
        self.nodes: dict[int, str] = {}

    def group(self, device: int) -> PlacementGroup:
        """See `DeviceSource.group`."""
        return self._groups[device]

    @property
    def complete(self) -> bool:
        """Whether every device is there."""
        return len(self.nodes) == len(self._groups)

    def leaving(self) -> list[int]:
        """No device: nobody takes a job's own devices away."""
        return []

    def revoked(self, device: int) -> None:
        """Nothing to note: `poll` asks Ray about every group."""

    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        """See `DeviceSource.poll`."""
        if wait_s:
            self._wait(wait_s)
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        came, gone = {}, []
        for device, group in self._groups.items():
            table = placement_group_table(group)
            node = next(iter(table.get("bundles_to_node_id", {}).values()), "")
            there = table.get("state") == "CREATED" and node in alive
            known = self.nodes.get(device)
            if known is not None and (not there or node != known):
                gone.append(device)
                del self.nodes[device]
                known = None
            if there and known is None:
                came[device] = self.nodes[device] = node
        return came, gone

    def _wait(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` seconds for the first group; Ray mostly creates the others at the same moment."""
        for group in self._groups.values():
            if not group.wait(wait_s):
                break
            wait_s = OTHER_GROUPS_WAIT_S

    def close(self) -> None:
        """Remove all groups. Ray kills what still runs inside."""
        groups, self._groups = self._groups, {}
        self.nodes.clear()
        for group in groups.values():
            remove_placement_group(group)

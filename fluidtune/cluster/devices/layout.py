"""What a device is for a job, worked out from what its trials ask for: `layout`.

A job has devices of one kind (`KINDS`): whole GPUs, one worker's cores each, or emulated ones. Every device is a
placement group with one bundle: other Ray jobs see it taken, its workers run inside it, and removing it kills them.
Which trial runs on which device is not decided here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fluidtune.device_kinds import KINDS, asked_for, by_resource
from fluidtune.engine.reasons import Reason, Why, because
from fluidtune.errors import FluidTuneError

_SPEC = re.compile(r"(\w+)(?::(\d+))?")
#: CPUs of the real cluster that an emulated worker takes. 1,000 of them must fit one core.
EMULATED_CPUS = 0.001
#: Added to a quotient of resources before it is rounded down.
ROUNDING = 1e-9


@dataclass(frozen=True)
class DeviceSpec:
    """The user's device setting.

    ``kind``: a name of `KINDS`. ``count``: how many CPUs, GPUs or emulated devices the job takes; None: all of the
    cluster's.
    """

    kind: str
    count: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> DeviceSpec | None:
        """Read "cpu", "cpu:4", "gpu:2" or "emulated:8". None stays None: `layout` follows the trials' request then.

        Raises:
            FluidTuneError: the text is not such a setting.
        """
        if text is None:
            return None
        match = _SPEC.fullmatch(text) if isinstance(text, str) else None
        kind = None if match is None else KINDS.get(match[1])
        if match is None or kind is None or match[2] == "0" or not (kind.computes or match[2]):
            words = (f'"{name}", "{name}:N"' if kind.computes else f'or "{name}:N"' for name, kind in KINDS.items())
            raise FluidTuneError(
                f"devices={text!r} is not a device setting; use {', '.join(words)} with N >= 1, "
                "or leave it out to take what the script's trials ask for"
            )
        return cls(match[1], int(match[2]) if match[2] else None)


@dataclass(frozen=True)
class Layout:
    """How a job's trials sit on its devices, derived from what the script asks for one trial.

    ``kind``: see `DeviceSpec`. ``most``: the most devices that the job may have; None: any number that its
    trials can use. ``bundle``: Ray's resources of one device. ``share``: what one trial asks for, in devices: a part of
    one, 1.0, or several whole ones. ``packing``: how many workers one device may hold. ``worker``: Ray's resources of
    one worker. ``threads``: how many threads a worker's libraries are to use, where Ray would derive another number
    from the worker's part of the device's cores; None: what Ray says.
    """

    kind: str
    most: int | None
    bundle: dict[str, float]
    share: float
    packing: int
    worker: dict[str, float]
    threads: int | None = None

    @property
    def process_threads(self) -> int:
        """How many threads the libraries of a worker's process begin with, unless the user has set their number."""
        return self.threads or max(1, int(self.worker.get("CPU", 0)))

    def share_of(self, request: Mapping[str, float]) -> float:
        """What a trial with this request asks for, in devices.

        The first trial of the job has set the sizes of devices and workers: a trial that asks for less than that one
        gets as much as that one.
        """
        kind = KINDS[self.kind]
        asked = float(request.get(kind.resource, 0.0))
        if kind.cores:
            cores = self.bundle.get(kind.resource, 1.0)
            asked = asked / cores if asked <= cores else math.ceil(asked / cores)
        return max(self.share, asked)


def layout(
    spec: DeviceSpec | None,
    request: Mapping[str, float],
    cluster: Mapping[str, float],
    *,
    max_packing: int,
    concurrency: int | None = None,
    leased: bool = False,
    on_demand: bool = False,
    searched: bool = False,
    nodes: Sequence[Mapping[str, float]] = (),
) -> Layout:
    """Work out a job's devices from its trials' request.

    Args:
        spec: the user's setting. None: see `asked_for`.
        request: the resources of one trial, in one bundle, by Ray's names ("CPU", "GPU", custom ones).
        cluster: the cluster's total resources.
        max_packing: the most trials that may share a device, the packing limit c.
        concurrency: how many trials the script wants to run at the same time; None: it does not say.
        leased: devices are leases of whole GPUs or cores. An emulated device then takes a GPU of the Ray cluster.
        on_demand: devices are asked for when trials need them. The cluster may get further nodes, so that only ``spec``
            limits the devices, and a trial that no node can hold waits.
        searched: ``max_packing`` is how far the engine may search for the packing limit. A device on demand then holds
            what its trials ask for without it; trials that are packed share that.
        nodes: the total resources of every node; (): the cluster is one node. Where the nodes could not hold all
            devices otherwise, fewer workers share a device.

    Raises:
        FluidTuneError: the cluster cannot hold the devices or one trial; with ``on_demand``, no cluster could.
    """
    said, spec = spec, spec or DeviceSpec(asked_for(request))
    kind, known = KINDS[spec.kind], by_resource()
    extra = {name: float(amount) for name, amount in request.items() if name not in known and amount}
    unlimited = on_demand or not (kind.computes or leased)
    there = math.inf if unlimited else int(cluster.get(kind.resource, 0))
    devices, share = _devices(spec, request, there)
    per_worker, per_device = _division(spec, request, extra, share, leased, said is None and on_demand)
    asked = int(1 / share) if share < 1 else 1
    threads = None
    if on_demand and searched:
        if share < 1 and not lack(request, nodes):  # no more trials on a device than a node has the cores of
            asked = _packing_with_room(asked, 1, nodes, per_worker, per_device)
            share = max(share, 1 / asked)
        max_packing = asked if extra else max_packing  # trials that ask for a custom resource each cannot share it
        threads = _share_cores(per_worker, per_device, asked)
    room = [devices_held(_bundle(1, per_worker, per_device), node) for node in nodes or [cluster]]
    packing = max(max_packing, asked)
    # On demand, the devices that the cluster has now are those that a script's concurrency is spread over.
    count = int(min(devices, sum(room) if on_demand else math.inf))
    if concurrency is not None and count:
        packing = max(packing, -(-concurrency // count))
    if share > 1:
        packing = 1
    if max(room) >= max(share, 1.0):
        packing = _packing_with_room(packing, min(count, sum(room)), nodes or [cluster], per_worker, per_device)
    elif on_demand:
        # Nothing is known of the nodes that are to come, but that they can hold one trial.
        packing = packing if searched else min(packing, asked)
    else:
        raise FluidTuneError(f"{_lacking(request, nodes or [cluster])}; ask for less, or start Ray with it")
    # Emulated workers compute nothing: what the device has is not divided among them.
    divided = per_device if kind.computes else {}
    # Ray counts ten-thousandths, and some releases round them up.
    parts = {name: math.floor(amount * 10_000 / packing + ROUNDING) / 10_000 for name, amount in divided.items()}
    return Layout(
        kind=spec.kind,
        most=None if devices == math.inf else int(devices),
        bundle=_bundle(packing, per_worker, per_device),
        share=max(share, 1 / packing) if share < 1 else share,
        packing=packing,
        worker={name: amount for name, amount in {**per_worker, **parts}.items() if amount},
        threads=threads,
    )


def _share_cores(per_worker: dict[str, float], per_device: dict[str, float], asked: int) -> int:
    """Give a device the cores of ``asked`` trials, whatever number is packed. Returns the whole cores of one trial."""
    cpus = per_worker.pop("CPU", 0.0)
    per_device["CPU"] = cpus * asked
    return max(1, int(cpus))


def lack(request: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Say that no node has what one trial needs; None: a node has it."""
    fits = any(all(node.get(name, 0.0) >= amount for name, amount in request.items()) for node in nodes)
    return None if fits else _lacking(request, nodes)


def _lacking(request: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in request}
    short = "".join(f" ({most[name]:g} {name} at most)" for name in request if most[name] < request[name])
    asked = ", ".join(f"{amount:g} {name}" for name, amount in request.items() if amount)
    return f"a trial asks for {asked}, and no node of the Ray cluster has that{short}"


def refusal(
    asked: float, noun: str, most: float, node: float = math.inf, gang: float = math.inf, parts: bool = False
) -> Why | None:
    """Why a trial may not ask for so many devices; None: it may. ``noun``: what one of them is called.

    ``most``: those that the job may have; ``node``: those of one node; ``gang``: those that are leased together.
    ``parts``: above one it may be any number.
    """
    if not parts and 1 < asked != int(asked):
        return because(Reason.DEVICE_PARTS, asked=asked, noun=noun)
    if asked > most:
        return because(Reason.JOB_SMALL, asked=asked, largest=most, noun=noun)
    if asked > node:
        return because(Reason.NODE_SMALL, asked=asked, largest=node)
    return because(Reason.LEASED_FEWER, asked=asked, first=gang) if asked > gang else None


def refused(trial: str, why: Why) -> FluidTuneError:
    """The error of the ``trial`` that is refused."""
    return FluidTuneError(f"{trial} is refused: {why.words}; {why.reason.remedy}")


def _devices(spec: DeviceSpec, request: Mapping[str, float], there: float) -> tuple[float, float]:
    """The most devices that the job may have, and what a trial asks for: so many of them, or a part of one.

    ``there``: how much the cluster has of what devices are made of, or infinity where that does not matter.
    """
    kind, name = KINDS[spec.kind], KINDS[spec.kind].resource
    if (spec.count or 1) > there:
        wanted = f'devices="{spec.kind}:{spec.count}"' if spec.count else f'devices="{spec.kind}"'
        raise FluidTuneError(
            f"{wanted} asks for {spec.count or 1} {name}s, the Ray cluster has {there:g}; "
            f"ask for at most {there:g}" + ("" if there else f" (start Ray where it sees {name}s)")
        )
    asked, count = float(request.get(name, 0.0)), spec.count or there
    if why := refusal(asked, kind.noun, count, parts=kind.cores):
        raise refused("the job's first trial", why)
    share = asked or 1.0
    if kind.cores:
        return count // max(1.0, asked) if count < math.inf else count, min(share, 1.0)
    return count, share


def _division(
    spec: DeviceSpec,
    request: Mapping[str, float],
    extra: Mapping[str, float],
    share: float,
    leased: bool,
    coreless: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """The resources that every worker brings to its device, and those that a device has however many workers it holds.

    A trial over several devices is one process: what it asks for is divided over those that it holds. ``coreless``:
    a device of cores need not have one, where trials ask for custom resources alone.
    """
    kind, cpus, over = KINDS[spec.kind], float(request.get("CPU", 0.0)), max(share, 1.0)
    per_worker = {name: amount / over for name, amount in extra.items()}
    if not kind.computes:
        return {**per_worker, "CPU": EMULATED_CPUS}, {kind.resource: 1.0 if leased else 0.0}
    if not kind.cores:
        return {**per_worker, "CPU": cpus / over}, {kind.resource: 1.0}
    return per_worker, {} if coreless and extra and not cpus else {"CPU": max(1.0, cpus)}


def _packing_with_room(
    packing: int,
    wanted: int,
    nodes: Sequence[Mapping[str, float]],
    per_worker: Mapping[str, float],
    per_device: Mapping[str, float],
) -> int:
    """The most workers per device, at most ``packing``, with which the nodes hold ``wanted`` devices.

    A device that no node can hold would wait for ever.
    """
    while sum(devices_held(_bundle(packing, per_worker, per_device), node) for node in nodes) < wanted:
        packing -= 1
    return packing


def _bundle(workers: int, per_worker: Mapping[str, float], per_device: Mapping[str, float]) -> dict[str, float]:
    """The resources of one device that holds this many workers."""
    bundle = {**{name: amount * workers for name, amount in per_worker.items()}, **per_device}
    return {name: amount for name, amount in bundle.items() if amount}


def devices_held(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How many devices with this bundle a node can hold."""
    return int(min(node.get(name, 0.0) / amount + ROUNDING for name, amount in bundle.items()))

"""What a device is for a job, worked out from what its trials ask for: `layout`.

A job has `gpu` devices (whole GPUs), `cpu` devices (one worker's cores each) or `emulated` ones. Every device is a
placement group with one bundle: other Ray jobs see it taken, its workers run inside it, and removing it kills them.
Which trial runs on which device is not decided here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fluidtune.errors import FluidTuneError

_SPEC = re.compile(r"(cpu|gpu|emulated)(?::(\d+))?")
#: CPUs of the real cluster that an emulated worker takes. 1,000 of them must fit one core.
EMULATED_CPUS = 0.001
#: Added to a quotient of resources before it is rounded down.
ROUNDING = 1e-9


@dataclass(frozen=True)
class DeviceSpec:
    """The user's device setting.

    ``kind``: "cpu", "gpu" or "emulated". ``count``: how many CPUs, GPUs or emulated devices the job takes; None: all
    of the cluster's.
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
        if match is None or match[2] == "0" or match[0] == "emulated":
            raise FluidTuneError(
                f'devices={text!r} is not a device setting; use "gpu", "gpu:N", "cpu", "cpu:N" or "emulated:N" '
                "with N >= 1, or leave it out to take what the script's trials ask for"
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
    on_demand: bool = False,
    searched: bool = False,
    nodes: Sequence[Mapping[str, float]] = (),
) -> Layout:
    """Work out a job's devices from its trials' request.

    Args:
        spec: the user's setting. None: a trial that asks for GPUs runs on GPUs, any other on CPUs.
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
    said, spec = spec, spec or DeviceSpec("gpu" if request.get("GPU", 0.0) > 0 else "cpu")
    extra = {name: float(amount) for name, amount in request.items() if name not in ("CPU", "GPU") and amount}
    if not on_demand:
        _check_custom_resources(extra, cluster)
    unlimited = on_demand or (spec.kind == "emulated" and not leased)
    there = math.inf if unlimited else int(cluster.get("CPU" if spec.kind == "cpu" else "GPU", 0))
    devices, share = (_cpu_devices if spec.kind == "cpu" else _gpu_devices)(spec, request, there)
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
        raise FluidTuneError(f"{_lacking(request)}; ask for less, or start Ray with it")
    return _layout(spec, devices, share, packing, per_worker, per_device, threads)


def _layout(
    spec: DeviceSpec,
    devices: float,
    share: float,
    packing: int,
    per_worker: Mapping[str, float],
    per_device: Mapping[str, float],
    threads: int | None,
) -> Layout:
    """The layout of at most this many devices, each for ``packing`` workers. ``share``: what a trial asks for."""
    # Emulated workers compute nothing: what the device has is not divided among them.
    divided = {} if spec.kind == "emulated" else per_device
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
    return None if fits else _lacking(request)


def _lacking(request: Mapping[str, float]) -> str:
    asked = ", ".join(f"{amount:g} {name}" for name, amount in request.items() if amount)
    return f"a trial asks for {asked}, and no node of the Ray cluster has that"


def _check_custom_resources(extra: Mapping[str, float], cluster: Mapping[str, float]) -> None:
    """FluidTuneError if the whole cluster has less of a custom resource than one trial asks for."""
    for name, amount in extra.items():
        if amount > cluster.get(name, 0.0):
            raise FluidTuneError(
                f"a trial asks for {amount:g} of the resource {name!r}, the Ray cluster has {cluster.get(name, 0):g}; "
                "ask for less, or start Ray with it"
            )


def odd_gpus(gpus: float) -> str | None:
    """Say what is wrong with a trial that asks for this number of GPUs; None: nothing."""
    return f"asks for {gpus:g} GPUs; ask for a whole number or for 1 or less" if 1 < gpus != int(gpus) else None


def _gpu_devices(spec: DeviceSpec, request: Mapping[str, float], there: float) -> tuple[float, float]:
    """The most GPU or emulated devices, and how many of them (or what part of one) a trial asks for.

    ``there``: the cluster's GPUs, or infinity where it does not matter what the cluster has.
    """
    _check_enough(spec, there, "GPU")
    gpus = float(request.get("GPU", 0.0))
    if (odd := odd_gpus(gpus)) is not None:
        raise FluidTuneError(f"a trial {odd}")
    share = gpus or 1.0
    count = spec.count or there
    if share > count:
        raise FluidTuneError(
            f"a trial asks for {gpus:g} GPUs, the job has {count:g}; "
            "ask for fewer GPUs per trial or give the job more devices"
        )
    return count, share


def _cpu_devices(spec: DeviceSpec, request: Mapping[str, float], there: float) -> tuple[float, float]:
    """The most CPU devices, and what part of one a trial asks for. ``there``: as in `_gpu_devices`, of CPUs."""
    _check_enough(spec, there, "CPU")
    cpus = float(request.get("CPU", 0.0))
    count = (spec.count or there) // max(1.0, cpus) if spec.count or there < math.inf else math.inf
    if count < 1:
        raise FluidTuneError(
            f"a trial asks for {cpus:g} CPUs, the job has {spec.count or there}; "
            "ask for fewer CPUs per trial or give the job more devices"
        )
    return count, cpus if 0 < cpus < 1 else 1.0


def _division(
    spec: DeviceSpec,
    request: Mapping[str, float],
    extra: Mapping[str, float],
    share: float,
    leased: bool,
    coreless: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """The resources that every worker brings to its device, and those that a device has however many workers it holds.

    A trial over several GPUs is one process: what it asks for is divided over the devices that it holds. ``coreless``:
    a device of cores need not have one, where trials ask for custom resources alone.
    """
    cpus, over = float(request.get("CPU", 0.0)), max(share, 1.0)
    per_worker = {name: amount / over for name, amount in extra.items()}
    if spec.kind == "emulated":
        return {**per_worker, "CPU": EMULATED_CPUS}, {"GPU": 1.0 if leased else 0.0}
    if spec.kind == "gpu":
        return {**per_worker, "CPU": cpus / over}, {"GPU": 1.0}
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


def _check_enough(spec: DeviceSpec, there: float, name: str) -> None:
    """FluidTuneError if the user's setting asks for more CPUs or GPUs than there are."""
    if (spec.count or 1) > there:
        wanted = f'devices="{spec.kind}:{spec.count}"' if spec.count else f'devices="{spec.kind}"'
        raise FluidTuneError(
            f"{wanted} asks for {spec.count or 1} {name}s, the Ray cluster has {there:g}; "
            f"ask for at most {there:g}" + ("" if there else f" (start Ray where it sees {name}s)")
        )

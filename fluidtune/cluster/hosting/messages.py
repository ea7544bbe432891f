"""What a driver and its workers tell each other about a trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fluidtune.cluster import emulated
from fluidtune.cluster.hosting.train_workers import TrainRoom
from fluidtune.cluster.sharing.lanes import Eviction, LaneSettings, LaneTicket
from fluidtune.elastic.random_streams import Streams
from fluidtune.group_facts import GroupFacts

if TYPE_CHECKING:
    from fluidtune.engine.messages import Kind
    from salus_share.telemetry import DeviceSample


@dataclass(frozen=True)
class LoadSpec:
    """What a worker needs in order to host a trial.

    ``kwargs``: what Tune would pass to the trainable's constructor. ``delivered``: the number of iterations that Tune
    has seen. ``saves_every``: iterations after which Tune asks a class for a checkpoint; 0: it never does. ``repeats``:
    those that run again are reported again. ``own_numbers``: see `ReportedResults`. ``device``: a name of `KINDS`.
    ``emulation``: set for emulated devices. ``streams``: `GroupFacts.streams` of the worker in which the trial's code
    began; None: it begins here. ``lanes``: how the trials of a device share it; None: not by lanes. ``ticket``: set if
    the device is shared now. ``secret``: the trial's, by which its workers recognise each other (`meeting`).
    ``one_node``: all of its workers are on this node, so that no other one needs to reach them. ``may_grow``: it may
    have followers. ``may_be_squeezed``: processes of the job may share its GPU without lanes, so that the memory that
    runs out may be theirs. ``beside``: it takes turns on its core with a service. ``asked``: the
    resources that it asks for, by Ray's names. ``threads_of_device``: see `TrialResources.take`. ``train``: what it has
    for workers of Ray Train; None: these are not counted.
    """

    trial: str
    kwargs: dict[str, Any]
    delivered: int = 0
    saves_every: int = 0
    repeats: bool = False
    own_numbers: bool = False
    device: str = "cpu"
    emulation: emulated.Emulation | None = None
    streams: Streams | None = None
    lanes: LaneSettings | None = None
    ticket: LaneTicket | None = None
    secret: bytes = field(default=b"", repr=False)
    one_node: bool = False
    may_grow: bool = True
    may_be_squeezed: bool = False
    beside: bool = False
    asked: dict[str, float] = field(default_factory=dict)
    threads_of_device: int | None = None
    train: TrainRoom | None = None


@dataclass(frozen=True)
class Footprint:
    """What a process holds in which a paused trial waits: bytes of its own, and those that its node, or its
    container, has in all."""

    held: int
    of_node: int


@dataclass(frozen=True)
class AttachSpec:
    """What a worker needs in order to follow the leader of a trial.

    ``address``: `GroupFacts.address`. For the rest see `LoadSpec`.
    """

    trial: str
    address: Any
    secret: bytes = field(default=b"", repr=False)
    device: str = "cpu"
    emulation: emulated.Emulation | None = None


@dataclass
class IterationReply:
    """One iteration's result, and what the worker has learned in it.

    ``iteration``: its number by the trainable's own count. ``seconds``: its duration. ``facts``: of the trial and its
    followers; without the streams if they were sent before. ``anew``: why there is no result, and the trial begins
    anew. ``lack``: there is no result, because the trial needs more room than it has. ``memory``: the part of the
    device's memory that the trial has needed so far; None: not known. ``ephemeral``: the part of it that the trial
    needs only within an iteration. ``compute``: the part of its device that it kept busy, 0 to 1; None: not known.
    ``gpu``: what NVML says of the device; None in most iterations. ``saved``: what Tune's ``save`` would return now, if
    the result came with a checkpoint, so that Tune will ask. ``rewritten``: checkpoints of iterations that ran again
    and are not reported again. Tune lacks them, or the trial would have gone on from there. ``kept``: an earlier worker
    has done the iteration, and a commit has kept its result, which Tune has missed.
    """

    result: dict[str, Any]
    kind: Kind
    seconds: float
    iteration: int = 0
    facts: GroupFacts = field(default_factory=GroupFacts)
    anew: str | None = None
    lack: Eviction | None = None
    memory: float | None = None
    ephemeral: float = 0.0
    compute: float | None = None
    gpu: DeviceSample | None = None
    saved: Any = None
    rewritten: list[Any] = field(default_factory=list)
    kept: bool = False


@dataclass
class WorkerInfo:
    """Who a worker is.

    ``pid``, ``gpus``: its process id and the ids of its GPUs. ``mps``: whether it is a client of MPS; None: it was not
    asked to be one. ``why``: why it could not become one. ``forked``: it is a fork of its node's server. ``kind``: its
    GPU's product name; None: not known. ``broken``: why its GPU cannot be used; None: it can, as far as is known.
    """

    pid: int
    gpus: list[str] = field(default_factory=list)
    mps: bool | None = None
    why: str = ""
    forked: bool = False
    kind: str | None = None
    broken: str | None = None

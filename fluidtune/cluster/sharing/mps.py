"""A worker's part in NVIDIA MPS: where several processes share a GPU, it is a client of the GPU's daemon.

Before CUDA starts, the worker finds out which GPU it was given, sees that the GPU's daemon runs on its node (the first
worker starts it, see `salus_share.mps`) and sets its own environment. The guard that comes with the daemon stops it
when the last worker is gone, in whatever way that ended. Without MPS the processes take time slices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fluidtune.cluster.sharing.gpu_probe import failure_of_device
from fluidtune.cluster.sharing.lanes import causes
from fluidtune.device_kinds import started
from salus_share.mps import Mps, apply, is_fault
from salus_share.seat_table import home
from salus_share.telemetry import DeviceSample, Telemetry


@dataclass(frozen=True)
class MpsSettings:
    """``memory``: the most bytes that one client may allocate, None for all of the GPU.

    MPS takes a limit once, when a process starts, and a process that shares a GPU now may have it alone later. So this
    is the most that a client may ever have. `LaneMember` enforces the present share.
    """

    memory: int | None


@dataclass(frozen=True)
class MpsFound:
    """``client``: set if this process is a client of MPS. Else ``why`` says the reason."""

    client: Mps | None
    why: str = ""


def enter(settings: MpsSettings, gpus: Sequence[str], telemetry: Telemetry | None = None) -> MpsFound:
    """Make this process a client of its GPU's daemon, if MPS is available. ``gpus``: the ids that Ray gave it."""
    telemetry = telemetry or Telemetry()
    try:
        uuid = _uuid(gpus, telemetry.sample())
    except LookupError as error:
        return MpsFound(None, str(error))
    finally:
        telemetry.close()
    mps = Mps(uuid, home(f"mps-{uuid}"))
    try:
        if not mps.acquire():
            apply(mps.environment())
            return MpsFound(None, mps.why or "")
    except OSError as error:
        return MpsFound(None, str(error))
    # A trial on several GPUs has a daemon for each. No documentation promises that their clients can open each other's
    # GPU memory. Host memory always works.
    apply({"NCCL_P2P_DISABLE": os.environ.get("NCCL_P2P_DISABLE", "1"), **mps.environment(memory=settings.memory)})
    return MpsFound(mps)


def verify(found: MpsFound, torch: Any) -> None:
    """Check that CUDA starts under the daemon. If not, record that for other processes, and end this process.

    This process cannot undo it, and would train on cores without a message. Its trial goes on in another process,
    without MPS.
    """
    if found.client is None or torch.version.cuda is None:
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        _leave(found.client, f"CUDA does not start under it: {error}")


def failed(found: MpsFound | None, error: BaseException) -> None:
    """A trial's code raised ``error``. If it is a fault that ends all clients of the GPU, end this process.

    Where torch computes, it is one if CUDA fails from then on: a kernel that could not be started is no fault. Else the
    error's words tell. Nobody knows which trial caused the fault. The trial goes on from its last commit without MPS,
    where only the trial that causes a fault fails.
    """
    if found is None or found.client is None:
        return
    if started():
        failure = failure_of_device()
    else:
        failure = str(error).splitlines()[0] if any(map(is_fault, causes(error))) else None
    if failure is not None:
        _leave(found.client, f"a fault hit all trials of the GPU: {failure}")


def _leave(client: Mps, why: str) -> None:
    client.refuse(why)
    os._exit(1)


def _uuid(gpus: Sequence[str], found: Sequence[DeviceSample]) -> str:
    """The UUID of the one GPU that this process may use. Raises LookupError with the reason if it is not known."""
    if len(gpus) != 1:
        raise LookupError(f"Ray gave this worker {len(gpus)} GPUs, MPS is for those of one")
    if gpus[0].startswith(("GPU-", "MIG-")):
        return gpus[0]
    by_index = {str(sample.index): sample for sample in found}
    if gpus[0] not in by_index:
        raise LookupError(f"NVML does not know a GPU {gpus[0]}")
    if len({sample.name for sample in found}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise LookupError("GPUs of several kinds: CUDA numbers them otherwise unless CUDA_DEVICE_ORDER=PCI_BUS_ID")
    if by_index[gpus[0]].mig:
        raise LookupError("the GPU is divided by MIG; start Ray with its instances' UUIDs in CUDA_VISIBLE_DEVICES")
    return by_index[gpus[0]].uuid

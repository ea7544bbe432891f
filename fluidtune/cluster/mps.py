"""A worker's part in NVIDIA MPS: where several processes share a GPU, it is a client of the GPU's daemon.

Before CUDA starts the worker finds out which GPU it was given, has the daemon of that GPU on its own node (the first
worker starts it, see `salus_share.mps`) and sets its environment. The guard that comes with the daemon stops it when
the last worker is gone, however that ended. Without MPS the processes take time slices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fluidtune.cluster.lanes import causes
from salus_share.mps import Mps, apply, is_fault
from salus_share.seat_table import home
from salus_share.telemetry import DeviceSample, Telemetry


@dataclass(frozen=True)
class MpsSettings:
    """``memory``: bytes that one client may allocate at most, None: all of the GPU.

    MPS takes it once, when a process starts, and whoever shares a GPU now may have it alone later. So it is the
    most that any of them may ever have; today's share is `LaneMember`'s to enforce.
    """

    memory: int | None


@dataclass(frozen=True)
class MpsFound:
    """``client``: set if this process is one, else ``why`` it is none."""

    client: Mps | None
    why: str = ""


def enter(settings: MpsSettings, gpus: Sequence[str], telemetry: Telemetry | None = None) -> MpsFound:
    """Make this process a client of its GPU's daemon, if MPS can be had. ``gpus``: the ids that Ray gave it."""
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
    # A trial on several GPUs has a daemon for each. That their clients can open each other's GPU memory is promised
    # nowhere; through host memory they can always talk.
    apply({"NCCL_P2P_DISABLE": os.environ.get("NCCL_P2P_DISABLE", "1"), **mps.environment(memory=settings.memory)})
    return MpsFound(mps)


def verify(found: MpsFound, torch: Any) -> None:
    """See that CUDA starts under the daemon. If not, whoever comes is told, and this process ends.

    It cannot go back, and would train on cores without a word. Its trial goes on in another one, without MPS.
    """
    if found.client is None or torch.version.cuda is None:
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        _leave(found.client, f"CUDA does not start under it: {error}")


def failed(found: MpsFound | None, error: BaseException) -> None:
    """A trial's code raised ``error``. If that is a fault that ends all clients of the GPU, nobody knows whose it is.

    So this process ends, and its trial goes on from its last commit without MPS, where a fault is its maker's alone.
    """
    if found is not None and found.client is not None and any(map(is_fault, causes(error))):
        _leave(found.client, f"a fault hit all trials of the GPU: {str(error).splitlines()[0]}")


def _leave(client: Mps, why: str) -> None:
    client.refuse(why)
    os._exit(1)


def _uuid(gpus: Sequence[str], found: Sequence[DeviceSample]) -> str:
    """The UUID of the one GPU that this process may use. Raises LookupError, in words, if nobody can tell."""
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

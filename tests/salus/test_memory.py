"""Memory that is measured and held to: by fake meters, and by real processes."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from salus_share import Need, SalusError
from salus_share.memory import CONTEXT, CudaMeter, ResidentMeter, Usage, after_failure, is_out_of_memory
from tests.salus.processes import Child

MB = 1 << 20


def test_on_a_gpu_the_framework_is_what_the_process_holds_beyond_torchs_allocator(monkeypatch) -> None:
    held = {os.getpid(): 500 * MB}
    limits = []
    cuda = SimpleNamespace(
        init=lambda: None,
        get_device_properties=lambda device: SimpleNamespace(total_memory=1000 * MB, uuid="abc"),
        memory_reserved=lambda device: 100 * MB,
        memory_allocated=lambda device: 60 * MB,
        max_memory_allocated=lambda device: 90 * MB,
        set_per_process_memory_fraction=lambda part, device: limits.append(part),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    telemetry: Any = SimpleNamespace(process_memory=lambda uuid, pid: held.get(pid))
    meter = CudaMeter(0, telemetry)
    assert meter.read() == Usage(400 * MB, 60 * MB, 30 * MB)
    # Kernels were loaded that had not run before.
    held[os.getpid()] = 600 * MB
    assert meter.read().framework == 500 * MB
    meter.limit(800 * MB)
    assert limits == [pytest.approx(0.3)]
    # In a container the driver may not tell.
    held.clear()
    assert meter.read().framework == 500 * MB
    assert CudaMeter(0, telemetry).read().framework == CONTEXT
    # Or it tells of another container's process, whose pid is the same and which holds less.
    held[os.getpid()] = 50 * MB
    assert CudaMeter(0, telemetry).read().framework == CONTEXT


def test_which_errors_are_about_memory() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch.cuda's."""

    for error in (
        MemoryError(),
        OutOfMemoryError("CUDA"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("RESOURCE_EXHAUSTED: Failed to allocate 8589934592 bytes"),
        Exception("[xgboost] cudaErrorMemoryAllocation: out of memory"),
        OSError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    ):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
    no_handle = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert [is_out_of_memory(no_handle, free) for free in (None, 4 << 30, 1 << 20)] == [False, False, True]


def test_after_an_allocation_failed_it_asks_for_a_bigger_share_up_to_the_whole_device() -> None:
    asked = [Need(110, 220)]
    for _ in range(3):
        asked.append(after_failure(asked[-1], 1000))
    assert asked[1:] == [Need(110, 385), Need(110, 633), Need(110, 890)]
    with pytest.raises(SalusError, match="the whole device"):
        after_failure(asked[-1], 1000)


# Real memory


def measure_on_gpu(pipe) -> None:
    """The same by torch's allocator on a GPU; its context is the framework's."""
    import torch

    meter = CudaMeter()
    held = torch.ones(64 * MB, dtype=torch.uint8, device="cuda")
    meter.reset()
    scratch = torch.ones(128 * MB, dtype=torch.uint8, device="cuda")
    del scratch
    usage = meter.read()
    torch.cuda.empty_cache()
    meter.limit(usage.framework + usage.model + 100 * MB)
    try:
        torch.ones(128 * MB, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        pipe.send((usage, held.numel(), is_out_of_memory(error)))
    meter.lift()
    pipe.send(torch.ones(128 * MB, dtype=torch.uint8, device="cuda").numel())


@pytest.mark.gpu
def test_memory_on_a_gpu_is_measured_and_limited() -> None:
    with Child(measure_on_gpu) as child:
        usage, held, failed = child.told()
        assert (usage.model, usage.ephemeral) == (64 * MB, 128 * MB)
        assert usage.framework > 100 * MB and held == 64 * MB and failed
        assert child.told() == 128 * MB


def test_a_forked_process_counts_its_part_of_what_it_shares():
    # Seen: two forked trials counted the same pages, and the second one was never admitted.
    shared = bytearray(64 << 20)
    shared[::4096] = b"x" * len(shared[::4096])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(ResidentMeter().read().framework).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    in_fork = int(os.read(read, 100))
    assert in_fork < ResidentMeter._now() - (24 << 20) and len(shared) == 64 << 20

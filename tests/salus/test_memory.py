"""Memory that is measured, asked for in time, and held to: by fake meters, and by real processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from benchmarks.salus_jobs import service_status
from salus_share import Need, Refused, StaleToken, service
from salus_share.client import LaneClient
from salus_share.memory import CONTEXT, CudaMeter, ResidentMeter, Usage, after_failure, ask_for, is_out_of_memory
from salus_share.trial import SharedTrial
from tests.salus.processes import Child

MB = 1 << 20


def test_more_is_asked_for_before_it_runs_out_and_far_too_much_is_given_back() -> None:
    promised = Usage(100, 200, 1000).need()
    assert ask_for(Usage(100, 200, 1000), promised) is None
    assert ask_for(Usage(100, 200, 1040), promised) is None
    assert ask_for(Usage(100, 200, 1060), promised) == Need(330, 1166)
    assert ask_for(Usage(100, 220, 900), promised) == Need(352, 1100)
    assert ask_for(Usage(10, 10, 100), Need(200, 800)) == Need(22, 110)


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
    telemetry = SimpleNamespace(process_memory=lambda uuid, pid: held.get(pid))
    monkeypatch.setattr("salus_share.telemetry.Telemetry", lambda: telemetry)
    meter = CudaMeter()
    assert meter.read() == Usage(400 * MB, 60 * MB, 30 * MB)
    # Kernels were loaded that had not run before.
    held[os.getpid()] = 600 * MB
    assert meter.read().framework == 500 * MB
    meter.limit(800 * MB)
    assert limits == [pytest.approx(0.3)]
    # In a container the driver may not tell.
    held.clear()
    assert meter.read().framework == 500 * MB
    assert CudaMeter().read().framework == CONTEXT
    # Or it tells of another container's process, whose pid is the same and which holds less.
    held[os.getpid()] = 50 * MB
    assert CudaMeter().read().framework == CONTEXT


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


# A trial with a meter whose readings the test sets


class Told:
    """A meter whose readings the test sets."""

    def __init__(self) -> None:
        self.usage = Usage(0, 100, 200)
        self.limited: list[int] = []
        self.on_giving_back: Callable[[], object] = lambda: None

    def reset(self) -> None:
        pass

    def read(self) -> Usage:
        return self.usage

    def limit(self, share: int) -> None:
        self.limited.append(share)

    def lift(self) -> None:
        self.limited.append(-1)

    def give_back(self) -> None:
        self.on_giving_back()


def shared(directory, name: str, meter: Told) -> SharedTrial:
    return SharedTrial(LaneClient("device", name, capacity=1000, directory=directory), meter, 1000)


def iterate(trial: SharedTrial, times: int) -> None:
    for _ in range(times):
        with trial.iteration():
            pass


def test_an_unknown_trial_has_the_device_until_it_was_measured(directory) -> None:
    meter = Told()
    trial = shared(directory, "a", meter)
    trial.admit()
    iterate(trial, 3)
    assert trial.promised == Need(110, 220)
    assert meter.limited == [1000, 330]
    trial.leave()
    assert meter.limited[-1] == -1


def test_what_it_cached_is_given_back_before_others_are_let_in(directory) -> None:
    meter = Told()
    service.start(directory, 1000, "FAIR").close()
    reserved = []
    meter.on_giving_back = lambda: reserved.append(service_status(directory)["reserved"])
    trial = shared(directory, "a", meter)
    trial.admit()
    iterate(trial, 3)
    # Not there yet, then with the whole device, and only then with what it needs.
    assert reserved == [0, 1000]
    assert service_status(directory)["reserved"] == 330
    trial.leave()


def test_without_room_it_is_told_before_it_fails_and_knows_what_it_needs(directory) -> None:
    meter, other = Told(), LaneClient("device", "b", capacity=1000, directory=directory)
    trial = shared(directory, "a", meter)
    trial.admit(Need(110, 220))
    other.admit(Need(500, 100))
    meter.usage = Usage(0, 400, 215)
    iterate(trial, 1)
    with pytest.raises(StaleToken):
        iterate(trial, 1)
    assert trial.promised == Need(440, 237)
    trial.leave()
    other.leave()


def test_after_an_allocation_failed_it_asks_for_a_bigger_share_up_to_the_whole_device() -> None:
    asked = [Need(110, 220)]
    for _ in range(3):
        asked.append(after_failure(asked[-1], 1000))
    assert asked[1:] == [Need(110, 385), Need(110, 633), Need(110, 890)]
    with pytest.raises(Refused):
        after_failure(asked[-1], 1000)


def test_what_it_asked_for_after_a_failure_is_not_given_back(directory) -> None:
    meter, least = Told(), Need(110, 385)
    meter.usage = Usage(0, 10, 20)  # as if the iteration that failed came later
    client = LaneClient("device", "a", capacity=1000, directory=directory)
    trial = SharedTrial(client, meter, 1000, least=least)
    trial.admit(least)
    iterate(trial, 12)
    assert trial.promised == least
    trial.leave()


# Real memory


def measure(pipe) -> None:
    """P and E of a process that holds 64 MiB and uses 128 MiB more in between; then beyond its limit."""
    meter = ResidentMeter()
    held = bytearray(64 * MB)
    held[::4096] = b"x" * len(held[::4096])
    meter.reset()
    first = meter.read()
    scratch = bytearray(128 * MB)
    scratch[::4096] = b"x" * len(scratch[::4096])
    del scratch
    pipe.send((first, meter.read()))
    usage = meter.read()
    meter.limit(usage.framework + usage.model + 100 * MB)
    bytearray(64 * MB)
    try:
        bytearray(128 * MB)
    except MemoryError as error:
        pipe.send(is_out_of_memory(error) and not meter.is_full())
    meter.limit(usage.framework + usage.model + 4 * MB)
    full = meter.is_full()
    meter.lift()
    bytearray(128 * MB)
    pipe.send("lifted" if full and not meter.is_full() else "it does not know that it is full")


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
    # docs/bugs.md, 447: two forked trials counted the same pages, and the second one was never admitted.
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

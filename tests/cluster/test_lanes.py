"""A worker's part in sharing its device, with a real lane service and without Ray."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.salus_jobs import service_status
from fluidtune.cluster.sharing import lanes
from fluidtune.cluster.sharing.lanes import Lack, LaneMember, LaneSettings, LaneTicket
from fluidtune.errors import FluidTuneError
from salus_share import Need, ServiceLost, StaleToken, client, service
from salus_share.client import LaneClient
from salus_share.memory import Usage
from salus_share.seat_table import SeatTable, home
from salus_share.turns import INSIDE
from tests.contracts.processes import until

MB = 1 << 20
CAPACITY = 4096 * MB


def is_lane_service(process: psutil.Process) -> bool:
    """Whether a child process of the test's is the lane service of a device."""
    with contextlib.suppress(psutil.Error):
        return "salus_share.service" in process.cmdline()
    return False


@pytest.fixture
def settings() -> Iterator[LaneSettings]:
    made = LaneSettings(f"test-{uuid.uuid4().hex[:8]}", "HPT", CAPACITY, 1.0)
    yield made
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    for process in psutil.Process().children():
        if is_lane_service(process) and made.device in " ".join(process.cmdline()):
            process.kill()
            process.wait()
    shutil.rmtree(home(made.device), ignore_errors=True)


def turns(member: LaneMember, count: int = 3) -> None:
    for _ in range(count):
        with member.iteration():
            bytearray(8 * MB)


def touched(size: int) -> bytearray:
    """Memory that is really there."""
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    return block


def there(settings: LaneSettings) -> list[str]:
    status = service_status(home(settings.device))
    return sorted(job for lane in status["lanes"].values() for job in lane["jobs"])


def test_alone_it_is_measured_and_nobody_is_asked(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    assert member.settle(None) is None
    assert member.need is None
    turns(member)
    persistent, ephemeral = member.need or (0, 0)
    assert 0 < persistent < 1 and 0 <= ephemeral < 1
    assert member.compute is not None and 0 <= member.compute <= 1
    assert not home(settings.device).exists(), "a service was started for a trial that is alone"
    member.leave()


def test_it_joins_a_lane_when_its_device_is_shared_and_leaves_when_it_is_not(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    turns(member)
    assert member.settle(LaneTicket(None, 10.0, 0)) is None
    assert there(settings) == [f"a/{os.getpid()}"]
    turns(member)
    # Promoted: the lane's policy gets the new rung.
    assert member.settle(LaneTicket(None, 10.0, 2)) is None
    assert [seat.rung for seat in SeatTable(home(settings.device)).seats()] == [2]
    member.settle(None)
    until(lambda: there(settings) == [])
    turns(member)


class Gpu:
    """A meter of a GPU whose allocator keeps what it had until `give_back`."""

    usage = Usage(0, 200 * MB, 2000 * MB)

    def __init__(self, device: int) -> None:
        self.cached = 0

    def reset(self) -> None:
        self.cached = self.usage.ephemeral

    def read(self) -> Usage:
        return self.usage

    def limit(self, share: int) -> None:
        pass

    def lift(self) -> None:
        pass

    def give_back(self) -> None:
        self.cached = 0


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(current_device=lambda: 0, synchronize=lambda: None)
    monkeypatch.setattr(lanes, "_torch_with_cuda", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(lanes, "CudaMeter", Gpu)


def test_on_a_gpu_one_who_joined_within_an_iteration_finds_its_cache_empty(
    settings: LaneSettings, on_a_gpu: None
) -> None:
    member = LaneMember("a", settings, "cuda")
    turns(member)
    meter: Any = member._meter
    assert meter.cached > 0, "alone it keeps its cache"
    assert member.settle(LaneTicket(None, 10.0, 0)) is None
    assert meter.cached == 0, "it joined with what it cached when it was alone"
    other = LaneClient(settings.device, "other", capacity=CAPACITY, policy="HPT")
    table = SeatTable(home(settings.device))
    emptied = []
    meter.give_back = lambda: emptied.append(table.seats()[0].state)
    with member.iteration():
        # There is one lane for both.
        other.admit(Need(0, 2000 * MB))
        assert {seat.lane for seat in table.seats()} == {0}
    assert emptied == [INSIDE]
    other.leave()
    member.leave()


@pytest.mark.parametrize(
    ("mib", "workers", "said"),
    [
        (16384, 33, "at most 13"),
        (16384, 27, "at most 13"),
        (4864, 9, "at most 4"),
        (9728, 17, "at most 8"),
        (600, 1, "leave"),
    ],
)
def test_trials_whose_contexts_fill_a_gpu_are_refused_before_they_train(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, mib: int, workers: int, said: str
) -> None:
    def gpu_of(mib: int) -> None:
        found = SimpleNamespace(total_memory=mib * MB)
        cuda = SimpleNamespace(current_device=lambda: 0, get_device_properties=lambda _: found)
        monkeypatch.setattr(lanes, "_torch_with_cuda", lambda: SimpleNamespace(cuda=cuda))

    gpu_of(mib)
    with pytest.raises(FluidTuneError, match=f"{workers} trials on a GPU of {mib} MiB.*fill it; {said}"):
        LaneMember("a", LaneSettings("d", "HPT", None, 1.0, workers), "cuda")
    gpu_of(workers * 1200)
    member = LaneMember("a", LaneSettings("d", "HPT", None, 1.0, workers), "cuda")
    assert member._capacity == workers * 600 * MB


def test_one_without_a_lane_that_fails_beside_others_goes_back_to_the_queue(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    turns(member)
    with LaneClient(settings.device, "other", capacity=CAPACITY, policy="HPT") as other:
        # It came within the iteration, so that the driver has told nothing of it.
        other.admit(Need(CAPACITY // 2, 0))
        lack = member.failed(MemoryError())
        assert lack is not None and lack.need == member.need and not lack.between
        assert member.failed(ValueError("bad shape")) is None
    assert member.failed(MemoryError()) is None, "alone it is the trial's own"


def test_one_that_has_outgrown_its_device_while_alone_is_not_failed_for_it(
    settings: LaneSettings, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpu, "usage", Usage(0, 2000 * MB, 1800 * MB))
    member = LaneMember("a", settings, "cuda")
    turns(member)
    lack = member.settle(LaneTicket((0.4, 0.2), 10.0, 0))
    assert lack is not None and lack.between and "larger device" in lack.reason
    assert lack.need == member.need and sum(lack.need or ()) > 1
    assert there(settings) == []


def test_a_service_with_other_settings_costs_the_lane_and_not_the_trial(settings: LaneSettings) -> None:
    with LaneClient(settings.device, "other", capacity=CAPACITY, policy="FAIR") as other:
        other.admit(Need(1, 1))
        member = LaneMember("a", settings, "cpu")
        assert member.settle(LaneTicket((0.4, 0.2), 10.0, 0)) is None
        turns(member)


def test_where_there_is_no_room_it_says_so_and_goes_away(settings: LaneSettings, monkeypatch: Any) -> None:
    monkeypatch.setattr(lanes, "ADMIT_S", 0.2)
    with LaneClient(settings.device, "other", capacity=CAPACITY, policy="HPT") as other:
        other.admit(Need(CAPACITY // 2, CAPACITY // 2))
        member = LaneMember("a", settings, "cpu")
        lack = member.settle(LaneTicket((0.3, 0.1), 10.0, 0))
        assert lack is not None and "no room" in lack.reason and lack.between
        assert there(settings) == ["other"]
        member.leave()


def test_one_that_grows_without_room_is_told_before_it_fails(settings: LaneSettings) -> None:
    other = LaneClient(settings.device, "other", capacity=CAPACITY, policy="FAIR")
    settings = LaneSettings(settings.device, "FAIR", CAPACITY, 1.0)
    member = LaneMember("a", settings, "cpu")
    turns(member)
    member.settle(LaneTicket(None, 10.0, 0))
    other.admit(Need(CAPACITY - int(sum(member.need or ()) * CAPACITY) - 64 * MB, 0))
    hoard = touched(200 * MB)
    with pytest.raises(StaleToken) as told:
        turns(member, 30)
    lack = member.refused(told.value)
    assert lack.need is not None and sum(lack.need) * CAPACITY > 200 * MB and lack.between
    del hoard
    member.leave()
    until(lambda: there(settings) == ["other"])
    other.leave()


def test_a_failed_allocation_asks_for_more_until_the_device_is_all_its_own(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    assert member.failed(MemoryError()) is None, "alone it has no share that could be too small"
    member.settle(LaneTicket((0.4, 0.2), 10.0, 0))
    assert member.failed(ValueError("bad shape")) is None
    wrapped = RuntimeError("the training function failed")
    wrapped.__cause__ = MemoryError()
    assert member.failed(wrapped) == Lack("it ran out of the memory that it was promised", pytest.approx((0.4, 0.5)))
    member.leave()
    member.settle(LaneTicket((0.4, 0.6), 10.0, 0))
    assert member.failed(MemoryError()) is None
    member.leave()


def test_alone_it_may_have_what_the_user_said_that_its_device_has(settings: LaneSettings) -> None:
    small = LaneSettings(settings.device, "HPT", 1024 * MB, 1.0)
    member = LaneMember("a", small, "cpu")
    try:
        with pytest.raises(MemoryError):
            bytearray(1600 * MB)
        member.settle(LaneTicket((0.5, 0.1), 10.0, 0))
        member.settle(None)
        with pytest.raises(MemoryError):
            bytearray(1600 * MB)
    finally:
        member.lift()
        member.leave()
    bytearray(1600 * MB)


@pytest.mark.parametrize("why", ["lost", "no room for its process", "no room for its table"])
def test_a_service_that_cannot_be_had_costs_the_lane_and_not_the_trial(
    settings: LaneSettings, monkeypatch: Any, caplog: Any, why: str
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise ServiceLost("no lane service at all") if why == "lost" else BlockingIOError(11, "Try again")

    if why == "no room for its table":
        monkeypatch.setattr(client, "SeatTable", lost)
    else:
        monkeypatch.setattr(*((service, "start") if why == "lost" else (service.subprocess, "Popen")), lost)
    member = LaneMember("a", settings, "cpu")
    assert member.settle(LaneTicket((0.4, 0.2), 10.0, 0)) is None
    turns(member)
    assert member.settle(LaneTicket((0.4, 0.2), 10.0, 0)) is None
    assert sum("without a lane" in record.message for record in caplog.records) == 1

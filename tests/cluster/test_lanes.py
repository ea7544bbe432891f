"""A worker's part in sharing its device, with a real seat table and without Ray."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.sharing.lanes import Eviction, LaneMember, LaneSettings, LaneTicket
from fluidtune.errors import FluidTuneError
from salus_share.gate import Gate
from salus_share.memory import CONTEXT
from salus_share.packing import SEATS
from salus_share.seat_table import FILE, SeatTable, home
from salus_share.turns import INSIDE
from tests.salus.processes import at_most

MB = 1 << 20
CAPACITY = 4096 * MB


@pytest.fixture
def settings() -> Iterator[LaneSettings]:
    made = LaneSettings(f"test-{uuid.uuid4().hex[:8]}", "HPT", CAPACITY, 1.0)
    yield made
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    shutil.rmtree(home(made.device), ignore_errors=True)


def turns(member: LaneMember, count: int = 3) -> None:
    for _ in range(count):
        with member.iteration():
            bytearray(8 * MB)


def there(settings: LaneSettings) -> dict[str, int]:
    """The lanes of the trials on the device, by trial."""
    where = home(settings.device)
    return {seat.name: seat.lane for seat in SeatTable(where).seats()} if (where / FILE).exists() else {}


def neighbour(settings: LaneSettings, lane: int = 0) -> Gate:
    return Gate(home(settings.device), "other", settings.policy, lane=lane)


def test_alone_it_is_measured_and_nobody_is_asked(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    assert member.settle(None) is None
    assert member.need is None
    turns(member)
    persistent, ephemeral = member.need or (0, 0)
    assert 0 < persistent < 1 and 0 <= ephemeral < 1
    assert member.compute is not None and 0 <= member.compute <= 1
    assert not home(settings.device).exists(), "a trial that is alone has taken a seat"
    member.leave()


def test_it_joins_its_lane_when_its_device_is_shared_and_leaves_when_it_is_not(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    turns(member)
    assert member.settle(LaneTicket(3, (0.4, 0.2), 10.0, 0)) is None
    assert there(settings) == {"a": 3}
    turns(member)
    # Moved, and promoted: the lane's policy gets the new rung.
    assert member.settle(LaneTicket(1, (0.4, 0.2), 10.0, 2)) is None
    assert there(settings) == {"a": 1}
    assert [seat.rung for seat in SeatTable(home(settings.device)).seats()] == [2]
    member.settle(None)
    assert there(settings) == {}
    turns(member)


class Cuda:
    """torch.cuda on a GPU of ``total`` bytes. Its allocator keeps what it had until it is emptied.

    ``held``, ``ephemeral``: bytes of the trial between two iterations, and beyond these within one. NVML is not there.
    """

    total, held, ephemeral, cached = 16 << 30, 0, 2000 * MB, 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(total_memory=self.total, uuid="abc")

    def reset_peak_memory_stats(self, device: int) -> None:
        self.cached = self.ephemeral

    def memory_allocated(self, device: int) -> int:
        return self.held

    def max_memory_allocated(self, device: int) -> int:
        return self.held + self.ephemeral

    def empty_cache(self) -> None:
        self.cached = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=made))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return made


def test_on_a_gpu_one_who_joined_within_an_iteration_finds_its_cache_empty(settings: LaneSettings, cuda: Any) -> None:
    member = LaneMember("a", settings, "gpu")
    turns(member)
    assert cuda.cached > 0, "alone it keeps its cache"
    assert member.settle(LaneTicket(0, (0.2, 0.6), 10.0, 0)) is None
    assert cuda.cached == 0, "it joined with what it cached when it was alone"
    table = SeatTable(home(settings.device))
    emptied = []
    cuda.empty_cache = lambda: emptied.append(table.seats()[0].state)
    with member.iteration():
        # There is one lane for both.
        other = neighbour(settings)
    assert emptied == [INSIDE]
    other.leave()
    member.leave()


@pytest.mark.parametrize(
    ("mib", "workers", "said"),
    [
        (16384, 33, "at most 11"),
        (16384, 22, "at most 11"),
        (4864, 7, "at most 3"),
        (9728, 13, "at most 6"),
        (700, 1, "leave"),
    ],
)
def test_trials_whose_contexts_fill_a_gpu_are_refused_before_they_train(
    cuda: Cuda, mib: int, workers: int, said: str
) -> None:
    cuda.total = mib * MB
    with pytest.raises(FluidTuneError, match=f"{workers} trials on a GPU of {mib} MiB.*fill it; {said}"):
        LaneMember("a", LaneSettings("d", "HPT", None, 1.0, workers), "gpu")
    cuda.total = workers * 2 * CONTEXT
    member = LaneMember("a", LaneSettings("d", "HPT", None, 1.0, workers), "gpu")
    turns(member)
    # Its own context and the margin, of the half that the contexts of all leave.
    assert member.need is not None and member.need[0] == pytest.approx(1.1 / workers)


def test_one_without_a_lane_that_fails_beside_others_goes_back_to_the_queue(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    turns(member)
    # It came within the iteration, so that the driver has told nothing of it.
    other = neighbour(settings)
    lack = member.failed(MemoryError())
    assert lack is not None and lack.need == member.need and not lack.between
    assert member.failed(ValueError("bad shape")) is None
    other.leave()
    assert member.failed(MemoryError()) is None, "alone it is the trial's own"


@pytest.mark.parametrize("ephemeral", [1800, 600])
def test_one_that_needs_more_than_it_is_promised_says_so_before_it_fails(
    settings: LaneSettings, cuda: Cuda, ephemeral: int
) -> None:
    cuda.held, cuda.ephemeral = 2000 * MB - CONTEXT, ephemeral * MB
    member = LaneMember("a", settings, "gpu")
    turns(member)
    lack = member.settle(LaneTicket(0, (0.4, 0.2), 10.0, 0))
    assert lack is not None and lack.between and "more memory than there is" in lack.reason
    persistent, needed = member.need or (0, 0)
    assert lack.need == pytest.approx((persistent, max(0.2, needed)))
    assert there(settings) == {}
    # Half of the margin may be used.
    tight = 2000 * 1.05 / 4096, ephemeral * 1.05 / 4096
    assert member.settle(LaneTicket(0, (tight[0] + 0.001, tight[1] + 0.001), 10.0, 0)) is None
    cuda.held += 100 * MB
    turns(member, 10)
    assert member.settle(LaneTicket(0, (tight[0] + 0.001, tight[1] + 0.001), 10.0, 0)) is not None
    member.leave()


def test_it_is_held_to_what_it_is_promised_and_to_more_when_that_grows(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    try:
        assert member.settle(LaneTicket(0, (0.1, 0.1), 10.0, 0)) is None
        with pytest.raises(MemoryError), member.iteration():
            bytearray(1400 * MB)
        assert member.settle(LaneTicket(0, (0.1, 0.4), 10.0, 0)) is None
        with member.iteration():
            bytearray(1400 * MB)
    finally:
        member.leave()
    bytearray(2600 * MB)


def test_a_failed_allocation_asks_for_more_until_the_device_is_all_its_own(settings: LaneSettings) -> None:
    member = LaneMember("a", settings, "cpu")
    assert member.failed(MemoryError()) is None, "alone it has no share that could be too small"
    member.settle(LaneTicket(0, (0.4, 0.2), 10.0, 0))
    assert member.failed(ValueError("bad shape")) is None
    wrapped = RuntimeError("the training function failed")
    wrapped.__cause__ = MemoryError()
    assert member.failed(wrapped) == Eviction(
        "it ran out of the memory that it was promised", pytest.approx((0.4, 0.5))
    )
    member.leave()
    member.settle(LaneTicket(0, (0.4, 0.6), 10.0, 0))
    assert member.failed(MemoryError()) is None
    member.leave()


def test_alone_it_may_have_what_the_user_said_that_its_device_has(settings: LaneSettings) -> None:
    small = LaneSettings(settings.device, "HPT", 1024 * MB, 1.0)
    member = LaneMember("a", small, "cpu")
    try:
        with pytest.raises(MemoryError):
            bytearray(1600 * MB)
        member.settle(LaneTicket(0, (0.5, 0.1), 10.0, 0))
        member.settle(None)
        with pytest.raises(MemoryError):
            bytearray(1600 * MB)
    finally:
        member.lift()
        member.leave()
    bytearray(1600 * MB)


@pytest.mark.parametrize("why", ["another policy", "no room for its table", "no seat"])
def test_a_seat_that_cannot_be_had_costs_the_turns_and_not_the_trial(
    settings: LaneSettings, caplog: Any, why: str
) -> None:
    for _ in range({"another policy": 1, "no seat": SEATS}.get(why, 0)):
        Gate(home(settings.device), "other", "FAIR" if why == "another policy" else settings.policy)
    member = LaneMember("a", settings, "cpu")
    with at_most(resource.RLIMIT_FSIZE, 0) if why == "no room for its table" else contextlib.nullcontext():
        for _ in range(2):
            assert member.settle(LaneTicket(0, (0.3, 0.1), 10.0, 0)) is None
            turns(member)
    with pytest.raises(MemoryError), member.iteration():
        bytearray(2400 * MB)
    assert sum("without a lane" in record.message for record in caplog.records) == 1
    member.leave()

"""Several trials in one process: threads on a CPU, and lanes with streams and pools where there is a GPU."""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from salus_share import Need, Refused, ServiceLost, StaleToken
from salus_share.client import LaneClient
from salus_share.seat_table import SeatTable
from salus_share.streams import InProcessLanes, LaneJob
from tests.salus.processes import home


@pytest.fixture
def directory():
    with home() as made:
        yield made


def losses(job, seed: int = 3, device: str = "cpu", fail_at: int | None = None) -> list[float]:
    """A small training that draws from a generator of its own."""
    source = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 4, generator=source).to(device).requires_grad_()
    found = []
    for step in range(20):
        x = torch.randn(64, 16, generator=source).to(device)
        with job.iteration():
            if step == fail_at:
                raise MemoryError
            loss = ((x @ weight - 1) ** 2).mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight -= 0.05 * gradient
            found.append(loss.item())
    return found


class Alone:
    """A job without a device service."""

    def iteration(self):
        return torch.enable_grad()


@pytest.mark.parametrize("ephemeral", [10, 60], ids=["own lanes", "one lane"])
def test_trials_have_the_losses_they_have_alone_and_fail_alone(directory, ephemeral) -> None:
    lanes = InProcessLanes("cpu", "device", capacity=100, policy="FAIR", directory=directory)
    need = Need(5, ephemeral)
    started = [lanes.start(f"t{seed}", lambda job, s=seed: losses(job, s), need) for seed in range(2)]
    failing = lanes.start("fails", lambda job: losses(job, 9, fail_at=7), need)
    assert [future.result(30) for future in started] == [losses(Alone(), seed) for seed in range(2)]
    with pytest.raises(MemoryError):
        failing.result(30)
    with pytest.raises(Refused):
        lanes.start("large", losses, Need(50, 51)).result(30)
    table = SeatTable(directory)
    with table.lock():
        assert all(seat.state == 7 for seat in table.seats())


# A GPU's part, with a stand-in for CUDA


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What was done with pools and caches, in order."""
    found: list[str] = []

    @contextlib.contextmanager
    def use_mem_pool(*_):
        found.append("pool")
        yield

    def stream(*_):
        return SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)

    standins = {
        "Stream": stream,
        "current_stream": stream,
        "MemPool": SimpleNamespace,
        "use_mem_pool": use_mem_pool,
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "empty_cache": lambda: found.append("emptied"),
        "reset_peak_memory_stats": lambda _: None,
        "memory_allocated": lambda _: 10,
        "max_memory_allocated": lambda _: 30,
    }
    for name, standin in standins.items():
        monkeypatch.setattr(torch.cuda, name, standin)
    before(monkeypatch, "yield_memory", lambda _: found.append("yield_memory"))
    before(monkeypatch, "leave", lambda _: found.append("leave"))
    return found


def before(monkeypatch, method: str, do) -> None:
    """Have ``do(client)`` done before every call of a method of `LaneClient`."""
    its = getattr(LaneClient, method)

    def both(client: LaneClient, *args):
        do(client)
        return its(client, *args)

    monkeypatch.setattr(LaneClient, method, both)


def test_a_lanes_memory_is_its_pools_from_the_first_iteration_on_and_free_when_a_trial_goes(directory, said) -> None:
    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)

    def work(job: LaneJob) -> None:
        with job.iteration():
            said.append("iteration")
        job.yield_memory()
        with job.iteration():
            said.append("iteration")

    lanes.start("a", work, Need(10, 20)).result(30)
    once = ["pool", "iteration", "emptied"]
    assert said == [*once, "yield_memory", *once, "leave"]


def test_the_cache_is_not_emptied_while_another_trial_is_in_its_pool(directory, said, monkeypatch) -> None:
    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)
    inside, waits = threading.Event(), threading.Event()
    real = threading.Condition.wait_for

    def wait_for(condition, predicate, timeout=None):
        if not predicate() and inside.is_set():
            waits.set()
        return real(condition, predicate, timeout)

    monkeypatch.setattr(threading.Condition, "wait_for", wait_for)

    def stays(job: LaneJob) -> None:
        with job.iteration():
            inside.set()
            assert waits.wait(30), "nobody has waited for the pool"
            said.append("iteration")

    def ends(job: LaneJob) -> None:
        assert inside.wait(30)

    both = [lanes.start("stays", stays, Need(10, 20)), lanes.start("ends", ends, Need(10, 20))]
    for future in both:
        future.result(60)
    assert said.index("emptied") > said.index("iteration")


def test_a_lane_has_one_stream_and_one_pool_for_all_of_its_iterations_and_trials(directory, said) -> None:
    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)
    first = lanes.lane(1, "a")
    assert lanes.lane(1, "a") is first and lanes.lane(1, "b") is first
    assert lanes.lane(2, "b") is not first and lanes.lane(1, "a") is first
    lanes.forget("a")
    assert lanes.lane(1, "b") is not first, "nobody was in the lane"


@pytest.mark.parametrize("how", ["ends", "moves"])
def test_a_pool_is_not_freed_while_another_trial_is_in_its_own(directory, said, monkeypatch, how: str) -> None:
    """torch would end the process."""

    class Pool:
        def __del__(self) -> None:
            said.append("freed")

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)
    waits = threading.Event()
    real = threading.Condition.wait_for

    def wait_for(condition, predicate, timeout=None):
        if condition is lanes._pools._changed and not predicate():
            waits.set()
        return real(condition, predicate, timeout)

    monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
    lanes.lane(1, "goes")
    with lanes.in_pool():
        if how == "ends":
            thread = threading.Thread(target=lanes.forget, args=("goes",))
        else:
            thread = threading.Thread(target=lanes.lane, args=(2, "goes"))
        thread.start()
        assert waits.wait(30), "nobody has waited for the pool"
        assert "freed" not in said
    thread.join(30)
    assert "freed" in said


class FakeStream:
    """A CUDA stream: what has been done when its next kernel runs, and whether the CPU has waited for all of it."""

    def __init__(self, *_) -> None:
        self.done: set[str] = set()
        self.synchronized = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.done |= other.done

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeStreams:
    """Which stream, and which pool, each thread has entered: both are of the thread in torch."""

    def __init__(self, monkeypatch) -> None:
        self._here = threading.local()
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._within("streams", stream))
        monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, _: self._within("pools", pool))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current("streams"))

    @contextlib.contextmanager
    def _within(self, kind: str, entered):
        stack = self._here.__dict__.setdefault(kind, [])
        stack.append(entered)
        try:
            yield
        finally:
            assert stack.pop() is entered

    def current(self, kind: str):
        stack = self._here.__dict__.get(kind, [])
        return stack[-1] if stack else None


def test_an_iteration_sees_what_was_done_before_it_and_what_comes_after_sees_the_iteration(
    directory, said, monkeypatch
) -> None:
    """torch's own streams wait for nothing by themselves."""
    FakeStreams(monkeypatch)
    seen = []

    def work(job: LaneJob) -> None:
        own = torch.cuda.current_stream()
        for step in range(3):
            own.done.add(f"batch {step}")
            with job.iteration():
                lane = torch.cuda.current_stream()
                seen.append(lane is not own and f"batch {step}" in lane.done)
                lane.done.add(f"step {step}")
            seen.append(torch.cuda.current_stream() is own and f"step {step}" in own.done)
        with contextlib.suppress(MemoryError), job.iteration():
            torch.cuda.current_stream().done.add("part of a step")
            raise MemoryError
        seen.append("part of a step" in own.done)

    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)
    lanes.start("a", work, Need(10, 20)).result(30)
    assert seen == [True] * 7


def test_a_backward_pass_runs_in_the_trials_own_thread_and_pool(directory, said, monkeypatch) -> None:
    """torch's own threads are in no pool (`use_mem_pool`); they run unless torch is told otherwise, for each thread."""
    streams = FakeStreams(monkeypatch)
    seen = []

    def work(job: LaneJob) -> None:
        for _ in range(2):
            seen.append((torch._C._is_multithreading_enabled(), streams.current("pools") is not None))
            with job.iteration():
                seen.append((torch._C._is_multithreading_enabled(), streams.current("pools") is not None))

    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)
    lanes.start("a", work, Need(10, 20)).result(30)
    assert seen == [(True, False), (False, True)] * 2


@pytest.mark.parametrize("neighbour", [True, False], ids=["beside another", "alone"])
def test_the_gpu_is_waited_for_at_the_end_of_an_iteration_if_the_lane_has_another_trial(
    directory, said, monkeypatch, neighbour: bool
) -> None:
    FakeStreams(monkeypatch)
    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)
    over, there = threading.Event(), threading.Event()
    found = []

    def waits(job: LaneJob) -> None:
        there.set()
        assert over.wait(60)

    def work(job: LaneJob) -> None:
        with job.iteration():
            lane = torch.cuda.current_stream()
        found.append(lane.synchronized)

    others = [lanes.start("waits", waits, Need(5, 60))] if neighbour else []
    assert not neighbour or there.wait(60)
    lanes.start("a", work, Need(5, 60)).result(60)
    over.set()
    for future in others:
        future.result(60)
    assert found == [int(neighbour)]


def test_a_trial_that_failed_holds_nothing_when_it_leaves(directory, monkeypatch) -> None:
    class Model:
        pass

    models, held = [], []
    before(monkeypatch, "leave", lambda _: held.extend(model() for model in models))

    def work(job: LaneJob) -> None:
        model = Model()
        models.append(weakref.ref(model))
        with job.iteration():
            try:
                raise ValueError(f"bad shape of {type(model)}")
            except ValueError:
                raise MemoryError

    future = InProcessLanes("cpu", "device", capacity=100, policy="FAIR", directory=directory).start(
        "a", work, Need(1, 1)
    )
    assert isinstance(future.exception(30), MemoryError)
    assert held == [None]


def test_what_it_needs_is_told_before_an_iteration_and_never_after_one_that_ran(directory, said, monkeypatch) -> None:
    answers: list[Exception] = [ServiceLost("no service"), StaleToken("no room")]

    def answer(_: LaneClient) -> None:
        raise answers.pop(0)

    before(monkeypatch, "need", answer)
    lanes = InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)
    ran = []

    def work(job: LaneJob) -> None:
        for _ in range(4):
            with job.iteration():
                ran.append(len(answers))
        # The service could not be had before the fourth, and has no room before the fifth.
        with pytest.raises(StaleToken), job.iteration():
            ran.append(-1)

    lanes.start("a", work).result(30)
    assert ran == [2, 2, 2, 1]


@pytest.mark.gpu
def test_lanes_on_a_gpu_reuse_their_pool(directory) -> None:
    lanes = InProcessLanes("cuda:0", "device", capacity=4 << 30, policy="FAIR", directory=directory)
    need = Need(64 << 20, 3 << 30)
    started = [lanes.start(f"t{seed}", lambda job, s=seed: losses(job, s, "cuda"), need) for seed in range(3)]
    expected = [losses(Alone(), seed, "cuda") for seed in range(3)]
    for future, alone in zip(started, expected, strict=True):
        assert future.result(60) == pytest.approx(alone, rel=1e-5)

"""CUDA graphs that trials capture in threads of one process: torch's own context, and a stand-in for CUDA's graph."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from salus_share import Need
from salus_share.captures import CaptureRefused
from salus_share.streams import InProcessLanes, LaneJob
from tests.salus.processes import home
from tests.salus.test_streams import FakeStream, FakeStreams


class FakeGraph:
    """``torch.cuda.CUDAGraph`` where there is no CUDA."""

    begun: list[str]

    def capture_begin(self, pool=None, capture_error_mode: str = "global", check_input_liveness: bool = False) -> None:
        self.begun.append(capture_error_mode)

    def capture_end(self) -> None:
        pass


@pytest.fixture
def lanes(monkeypatch):
    monkeypatch.setattr(FakeGraph, "begun", [], raising=False)
    FakeStreams(monkeypatch)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "MemPool", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.enable_grad())
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    with home() as directory:
        yield InProcessLanes("cuda:0", "device", capacity=100, policy="FAIR", directory=directory)


def by_context(**mode: str) -> None:
    """As users do, and ``make_graphed_callables``."""
    with torch.cuda.graph(FakeGraph(), stream=FakeStream(), **mode):
        pass


def by_call(**mode: str) -> None:
    FakeGraph().capture_begin(None, **mode)


def capture(lanes: InProcessLanes, how, neighbour: bool, **mode: str):
    """What became of a trial that captures a graph. ``neighbour``: another one runs meanwhile."""
    over = threading.Event()
    others = [lanes.start("waits", lambda job: over.wait(60), Need(5, 10))] if neighbour else []

    def work(job: LaneJob) -> None:
        with job.iteration():
            lane = torch.cuda.current_stream()
            try:
                how(**mode)
            finally:
                assert torch.cuda.current_stream() is lane, "its steps would go on in the capture's stream"

    error = lanes.start("captures", work, Need(5, 10)).exception(60)
    over.set()
    assert all(future.result(60) for future in others)
    return error


@pytest.mark.parametrize("how", [by_context, by_call])
def test_a_capture_that_neighbours_would_break_is_refused_before_it_begins(lanes, how) -> None:
    error = capture(lanes, how, neighbour=True)
    assert isinstance(error, CaptureRefused) and 'capture_error_mode="thread_local"' in str(error)
    assert FakeGraph.begun == [] and "\n" not in str(error)


@pytest.mark.parametrize("how", [by_context, by_call])
def test_captures_that_nobody_disturbs(lanes, how) -> None:
    assert capture(lanes, how, neighbour=False) is None
    assert capture(lanes, how, neighbour=True, capture_error_mode="thread_local") is None
    assert FakeGraph.begun == ["global", "thread_local"]


def test_torch_is_as_it_was_when_no_trial_runs(lanes) -> None:
    before = torch.cuda.graph.__enter__, FakeGraph.capture_begin
    inside = []
    lanes.start("a", lambda job: inside.append(torch.cuda.graph.__enter__), Need(5, 10)).result(60)
    assert inside[0] is not before[0]
    assert (torch.cuda.graph.__enter__, FakeGraph.capture_begin) == before

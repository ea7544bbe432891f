"""What a trial changes in its process is put back, and what cannot be put back is noticed."""

from __future__ import annotations

import atexit
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from fluidtune.cluster import process_leftovers
from fluidtune.cluster.process_reset import ProcessBaseline


@pytest.fixture
def baseline(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessBaseline]:
    monkeypatch.setattr(process_leftovers, "GRACE_S", 0.2)
    # Nothing of this test's process itself may be lost to the tests after it.
    streams = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("register", "unregister"):
        monkeypatch.setattr(atexit, name, getattr(atexit, name))
    made = ProcessBaseline(watch=True)
    made.note_imports()
    yield made
    made.restore()
    random.setstate(streams[0])
    numpy.random.set_state(streams[1])
    torch.set_rng_state(streams[2])


def test_a_process_that_nothing_happened_to_is_clean(baseline: ProcessBaseline) -> None:
    assert baseline.restore() is None


def test_torchs_defaults_are_put_back(baseline: ProcessBaseline) -> None:
    threads = torch.get_num_threads()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads + 1)
    torch.use_deterministic_algorithms(True)
    assert baseline.restore() is None
    assert torch.empty(1).device.type == "cpu"
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_streams_are_not_what_the_trial_made_them(baseline: ProcessBaseline) -> None:
    drawn = set()
    for _ in range(2):
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        baseline.restore()
        drawn.add((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [2, 2, 2]


def test_environment_directory_and_path_are_put_back(baseline: ProcessBaseline, tmp_path: Path) -> None:
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # pytest's own, another one in every phase of a test
    baseline = ProcessBaseline()
    before = dict(os.environ), os.getcwd(), list(sys.path)
    os.environ["A_TRIALS_OWN"] = "1"
    os.environ["PATH"] = "/nowhere"
    os.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    assert baseline.restore() is None
    assert (dict(os.environ), os.getcwd(), list(sys.path)) == before


def test_a_variable_that_the_trial_deleted_is_back(baseline: ProcessBaseline) -> None:
    path = os.environ.pop("PATH")
    baseline.restore()
    assert os.environ["PATH"] == path


def test_a_thread_that_goes_on_is_named(baseline: ProcessBaseline) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left by a trial", daemon=True)
    thread.start()
    assert "left by a trial" in str(baseline.restore())
    stop.set()
    thread.join()
    assert baseline.restore() is None


def test_a_thread_that_is_about_to_end_is_waited_for(baseline: ProcessBaseline) -> None:
    thread = threading.Timer(0.05, lambda: None)
    thread.start()
    assert baseline.restore() is None


@pytest.mark.parametrize("name", ["ray_something", "tqdm_monitor", "fluid-writer"])
def test_a_librarys_own_thread_is_no_harm(baseline: ProcessBaseline, name: str) -> None:
    stop = threading.Event()
    threading.Thread(target=stop.wait, name=name, daemon=True).start()
    try:
        assert baseline.restore() is None
    finally:
        stop.set()


def test_a_child_process_is_noticed(baseline: ProcessBaseline) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert str(child.pid) in str(baseline.restore())
    finally:
        child.kill()
        child.communicate()
    assert baseline.restore() is None


def test_memory_is_noticed(baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_leftovers, "MEMORY_ALLOWANCE", 64 << 20)
    kept = bytearray(os.urandom(1 << 20)) * 128
    assert "memory left behind" in str(baseline.restore())
    del kept
    assert baseline.restore() is None

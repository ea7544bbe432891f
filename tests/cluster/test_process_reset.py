"""What a trial changes in its process is put back, and what cannot be put back is noticed."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import logging.handlers
import os
import random
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from fluidtune.cluster import gpu_probe, process_leftovers, process_reset
from fluidtune.cluster.process_reset import ProcessBaseline
from salus_share.telemetry import DeviceSample


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


def test_other_processes_are_looked_at_only_if_there_are_children() -> None:
    """A machine may have thousands, and a trial waits for this worker."""
    code = """if True:
        import psutil, subprocess, sys
        from fluidtune.cluster.process_leftovers import Leftovers
        looks, before = [], psutil.Process.children
        psutil.Process.children = lambda self, *more: looks.append(self) or before(self, *more)
        leftovers = Leftovers()
        assert leftovers.found() is None and not looks, looks
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert str(child.pid) in leftovers.found() and looks
        child.communicate()
        assert leftovers.found() is None
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_is_noticed(baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_leftovers, "MEMORY_ALLOWANCE", 64 << 20)
    kept = bytearray(os.urandom(1 << 20)) * 128
    assert "memory left behind" in str(baseline.restore())
    del kept
    assert baseline.restore() is None


def test_exit_handlers_of_the_trials_code_run_when_it_leaves_the_last_one_first(baseline: ProcessBaseline) -> None:
    # docs/bugs.md, 120
    called: list[str] = []

    def late() -> None:
        called.append("late")
        atexit.register(called.append, "by a handler")

    atexit.register(called.append, "first")
    atexit.register(late)
    assert atexit.register(called.append) == called.append
    atexit.unregister(called.append)  # all of them
    atexit.register(called.append, "second")
    atexit.register(lambda: 1 / 0)
    assert baseline.restore() is None
    assert called == ["second", "late", "by a handler"]
    assert baseline.restore() is None and len(called) == 3


def test_a_librarys_exit_handler_waits_for_the_end_of_the_process(
    baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    code = compile("import atexit; atexit.register(call)", f"{os.path.dirname(torch.__file__)}/somewhere.py", "exec")
    exec(code, {"__name__": "torch.somewhere", "call": lambda: called.append("x")})
    assert baseline.restore() == "exit handlers left by torch"
    assert not called
    for handler in baseline._exits._handlers:
        baseline._exits._unregister(handler)


def test_what_the_import_of_a_library_changes_stays(
    baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site-packages" / "a_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import atexit, logging, os, warnings\n"
        "os.environ['A_LIBRARYS_OWN'] = '1'\n"
        "warnings.filterwarnings('ignore', message='a library')\n"
        "logging.getLogger('a_library').setLevel(5)\n"
        "atexit.register(print, end='')\n"
    )
    monkeypatch.setenv("A_LIBRARYS_OWN", "to be undone after this test")
    monkeypatch.delenv("A_LIBRARYS_OWN")
    os.environ["A_TRIALS_OWN"] = "1"
    sys.path.insert(0, str(package.parent))
    importlib.import_module("a_library")
    assert baseline.restore() is None
    assert os.environ.get("A_LIBRARYS_OWN") == "1" and "A_TRIALS_OWN" not in os.environ
    assert any("a library" in str(each[1]) for each in warnings.filters)
    assert logging.getLogger("a_library").level == 5 and "a_library" in sys.modules
    logging.getLogger("a_library").setLevel(50)
    assert baseline.restore() is None
    assert logging.getLogger("a_library").level == 5
    del sys.modules["a_library"]


@pytest.mark.parametrize(
    "how", ["from users_base import Base", "from users_base import made", "import users_base", "import its_helper"]
)
def test_a_library_that_uses_a_module_of_the_users_own_makes_the_process_dirty(
    how: str, baseline: ProcessBaseline, tmp_path: Path
) -> None:
    """docs/bugs.md, 219: the next trial's module would have another class of that name than the library."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (tmp_path / "users_base.py").write_text("class Base: pass\nmade = Base()\n")
    (packages / "an_extension.py").write_text(f"{how}\n")
    (packages / "its_helper.py").write_text("value = 1\n")
    sys.path[:0] = [str(tmp_path), str(packages)]
    importlib.import_module("users_base")
    importlib.import_module("an_extension")
    found = baseline.restore()
    if how == "import its_helper":
        assert found is None
    else:
        assert found == "the module users_base, which would be imported anew, but an_extension holds the old one"
    for name in ("an_extension", "its_helper"):
        sys.modules.pop(name, None)
    assert "users_base" not in sys.modules


def test_modules_that_are_made_by_code_of_a_library_stay(baseline: ProcessBaseline) -> None:
    """docs/bugs.md, 220: torch makes these, and they name a file without a folder."""
    for name in ("torch.ops", "torch.classes"):
        baseline._modules.discard(name)
    try:
        assert baseline.restore() is None
        assert {"torch.ops", "torch.classes"} <= set(sys.modules)
    finally:
        sys.modules.update({"torch.ops": torch.ops, "torch.classes": torch.classes})


def test_a_trials_log_handler_is_closed(baseline: ProcessBaseline, tmp_path: Path) -> None:
    handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(tmp_path / "log"))
    logging.getLogger("of a trial").addHandler(handler)
    logging.getLogger("of a trial").warning("kept in memory")
    handler.target.addFilter(lambda record: True)  # type: ignore[union-attr]
    baseline.restore()
    assert (tmp_path / "log").read_text() == "kept in memory\n"


def test_memory_of_another_framework_is_noticed(baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    held = {os.getpid(): 3 << 30, 1: 9 << 30}
    sample = DeviceSample(0, "GPU-a", "a GPU", 0.0, 12 << 30, 80 << 30, False, held)
    baseline = ProcessBaseline()
    monkeypatch.setattr(baseline._leftovers._gpu, "_telemetry", SimpleNamespace(sample=lambda: [sample]))
    assert baseline.restore() == "GPU memory left behind: 3072 MiB that are not torch's"
    held[os.getpid()] = 500 << 20
    assert baseline.restore() is None


def test_a_process_whose_cuda_has_failed_serves_no_further_trial(
    baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")

    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, synchronize=fail)
    monkeypatch.setattr(gpu_probe, "torch_on_gpu", lambda torch: SimpleNamespace(cuda=cuda))
    assert baseline.restore() == "CUDA cannot be used any more: CUDA error: device-side assert triggered"
    cuda.synchronize = lambda: None
    assert baseline.restore() is None


def test_the_gpu_gets_back_what_a_trial_had_and_the_next_one_has_a_peak_of_its_own(
    baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        def __init__(self) -> None:
            self.hooks = [self]  # only the collector frees it

    called: list[str] = []
    freed = weakref.finalize(Model(), called.append, "the model is freed")
    cuda = {name: lambda name=name: called.append(name) for name in ("empty_cache", "reset_peak_memory_stats")}
    workspaces = SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: called.append("workspaces"))
    here = SimpleNamespace(cuda=SimpleNamespace(**cuda), _C=workspaces)
    monkeypatch.setattr(process_reset, "torch_on_gpu", lambda: here)
    gc.disable()
    try:
        assert baseline.restore() is None
    finally:
        gc.enable()
    assert called == ["the model is freed", "workspaces", "empty_cache", "reset_peak_memory_stats"]
    assert not freed.alive

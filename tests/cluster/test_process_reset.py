"""What a trial changes in its process is put back, and what cannot be put back is noticed."""

from __future__ import annotations

import atexit
import codecs
import gc
import importlib
import logging
import logging.handlers
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch._dynamo  # torch imports it when it is first used
from ray.experimental import tqdm_ray

from fluidtune.cluster.cleaning import process_leftovers, process_reset, process_settings, trial_modules
from fluidtune.cluster.cleaning.process_reset import ProcessBaseline
from fluidtune.cluster.cleaning.process_settings import looked_at
from fluidtune.cluster.sharing import gpu_probe
from fluidtune.ray_compat import ownership
from salus_share.telemetry import DeviceSample


@pytest.fixture
def baseline(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessBaseline]:
    monkeypatch.setattr(process_leftovers, "GRACE_S", 0.2)
    # Nothing of this test's process itself may be lost to the tests after it.
    streams = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    noted = ((atexit, "register"), (atexit, "unregister"), (sys, "addaudithook"), (codecs, "register"))
    for owner, name in (*noted, (torch, "set_num_interop_threads")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    tqdm_ray.instance()  # Ray replaces `print` with it, whenever it is first needed
    made = ProcessBaseline()
    made.note_imports()
    yield made
    made.restore()
    random.setstate(streams[0])
    numpy.random.set_state(streams[1])
    torch.set_rng_state(streams[2])


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


def test_other_processes_are_looked_at_only_if_there_are_children() -> None:
    """A machine may have thousands, and a trial waits for this worker."""
    code = """if True:
        import psutil, subprocess, sys
        from fluidtune.cluster.cleaning.process_leftovers import Leftovers
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


def test_cudas_own_memory_is_no_leak(
    baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # docs/bugs.md, 354
    status = tmp_path / "status"
    status.write_text("VmRSS: 9000000 kB\nRssAnon: 500000 kB\nRssFile: 8500000 kB\n")
    assert process_leftovers._own_memory(str(status)) == 500_000 << 10
    gpu = SimpleNamespace(cuda=SimpleNamespace(memory_allocated=int, memory_reserved=int))
    for grown, on_gpu, left in ((2 << 30, True, False), (2 << 30, False, True), (4 << 30, True, True)):
        monkeypatch.setattr(process_leftovers, "torch_on_gpu", lambda on_gpu=on_gpu: gpu if on_gpu else None)
        monkeypatch.setattr(process_leftovers, "_own_memory", lambda grown=grown: baseline._leftovers._rss + grown)
        assert ("memory left behind" in str(baseline._leftovers._memory_left())) == left


def test_what_was_there_after_the_first_trial_is_not_collected_again(baseline: ProcessBaseline) -> None:
    """In a process that is no fork the collector took 0.2 s after each trial. docs/bugs.md, 350."""
    gc.unfreeze()
    assert baseline.restore() is None and gc.get_freeze_count() > 10_000
    gc.unfreeze()
    assert baseline.restore() is None and gc.get_freeze_count() == 0  # once


@pytest.mark.parametrize(("file", "by"), [(__file__, "the trial"), (torch.__file__, "torch")])
def test_exit_handlers_wait_for_the_end_of_the_process(baseline: ProcessBaseline, file: str, by: str) -> None:
    # docs/bugs.md, 120
    def handler() -> None:
        raise AssertionError("the process has not ended")

    exec(compile("import atexit; atexit.register(handler)", file, "exec"), {"handler": handler})
    assert baseline.restore() == f"exit handlers left by {by}"
    atexit.unregister(handler)
    assert baseline.restore() is None


@pytest.fixture
def packages(baseline: ProcessBaseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    sys.path[:0] = [str(tmp_path), str(folder)]
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_known_package_that_was_imported_from_its_file_ends_the_process(
    baseline: ProcessBaseline, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its import has changed cannot be told from what the trial has changed."""
    monkeypatch.setattr(trial_modules, "VETTED", {*trial_modules.VETTED, "a_library"})
    (packages / "a_library.py").write_text("import logging\nlogging.getLogger('a_library').setLevel(5)\n")
    importlib.import_module("a_library")
    assert baseline.restore() == "packages that were imported from their files: a_library"


def test_what_a_trial_owns_in_ray_ends_the_process(baseline: ProcessBaseline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "owned", lambda: "an actor")
    assert baseline.restore() == "created in Ray: an actor"


@pytest.mark.parametrize(
    "how", ["from users_base import Base", "from users_base import made", "import users_base", "import its_helper"]
)
def test_a_library_that_uses_a_module_of_the_users_own_makes_the_process_dirty(
    how: str, baseline: ProcessBaseline, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/bugs.md, 219: the next trial's module would have another class of that name than the library."""
    monkeypatch.setattr(trial_modules, "VETTED", {*trial_modules.VETTED, "an_extension", "its_helper"})
    (packages.parent / "users_base.py").write_text("class Base: pass\nmade = Base()\n")
    (packages / "an_extension.py").write_text(f"{how}\n")
    (packages / "its_helper.py").write_text("value = 1\n")
    importlib.import_module("its_helper")
    baseline._known |= {"an_extension"}  # its package, of which this is another module
    importlib.import_module("users_base")
    module = importlib.import_module("an_extension")
    sys.modules["an_extension.more"] = module
    baseline._known |= {"its_helper"}
    found = baseline.restore()
    if how == "import its_helper":
        assert found is None
    else:
        assert found == "the module users_base, which would be imported anew, but an_extension.more holds the old one"
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
    monkeypatch.setattr(gpu_probe, "torch_on_gpu", lambda: SimpleNamespace(cuda=cuda))
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
    limits: list[float] = []
    here = SimpleNamespace(cuda=SimpleNamespace(**cuda, set_per_process_memory_fraction=limits.append), _C=workspaces)
    monkeypatch.setattr(process_reset, "torch_on_gpu", lambda: here)
    thresholds = gc.get_threshold()
    gc.set_threshold(1 << 30)
    try:
        baseline.restore()
    finally:
        gc.set_threshold(*thresholds)
    assert called == ["the model is freed", "workspaces", "empty_cache", "reset_peak_memory_stats"]
    assert not freed.alive
    assert limits == [1.0], "a limit that the trial has set is none of the next one's"


@pytest.mark.parametrize(
    "name", ["torch.backends.cuda.preferred_linalg_library", "torch.backends.cuda.preferred_blas_library"]
)
def test_the_library_that_a_trial_prefers_ends_its_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # docs/bugs.md, 393. The build of torch for cores refuses every other library.
    (setting,) = [each for each in looked_at(sys.modules.get) if each.name == name]
    before = setting.value()
    assert before is not None and setting.value() == before
    monkeypatch.setattr(torch.backends.cuda, name.rpartition(".")[2], lambda: "another")
    assert setting.value() == "another"


def test_waits_for_a_gpu_that_a_trial_forbids_end_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # docs/bugs.md, 393
    cuda = SimpleNamespace(get_sync_debug_mode=lambda: 0)
    on_gpu = SimpleNamespace(cuda=cuda)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: cuda.get_sync_debug_mode())
    (setting,) = [each for each in looked_at(sys.modules.get) if each.name == "torch's mode of waits"]
    before = setting.value()
    monkeypatch.setattr(process_settings, "torch_on_gpu", lambda: on_gpu)
    assert not process_reset._different([(setting, before)]), "a trial that only uses its GPU leaves nothing"
    cuda.get_sync_debug_mode = lambda: 2
    assert process_reset._different([(setting, before)]) == "changed: torch's mode of waits"

"""The recipe of `make horovod`, without building anything, and the messages if Horovod is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fluidtune
from fluidtune import doctor
from fluidtune.errors import FluidTuneError
from tools import horovod


def source(tmp_path):
    """A source tree with the text that the recipe replaces, and other lines around it."""
    files: dict[str, str] = {}
    for name, old, _ in horovod.MENDS:
        files[name] = files.get(name, "before\n") + old + "\nbetween\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_all_replacements_are_made(tmp_path):
    tree = source(tmp_path)
    horovod.mend(tree)
    for name, _, new in horovod.MENDS:
        assert new in (tree / name).read_text()
    assert "CMAKE_CXX_STANDARD 20" in (tree / "CMakeLists.txt").read_text()


def test_an_unknown_source_is_refused(tmp_path):
    tree = source(tmp_path)
    (tree / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 17)\n")
    with pytest.raises(RuntimeError, match=r"CMakeLists\.txt"):
        horovod.mend(tree)


def test_a_wheels_place_depends_on_all_that_it_is_built_for(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "")
    on_cpu = horovod.cache()
    assert on_cpu.parent == tmp_path / "fluidtune"
    assert horovod.cache() == on_cpu
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    assert horovod.cache() != on_cpu
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "")
    monkeypatch.setattr(horovod, "MENDS", ())
    assert horovod.cache() != on_cpu


def test_a_build_for_cpus_on_a_machine_with_gpus_says_so(monkeypatch, tmp_path):
    import torch

    monkeypatch.delenv("HOROVOD_GPU_OPERATIONS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert horovod.for_cpus_only() is None
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "nvcc" in horovod.for_cpus_only()
    (tmp_path / "nvcc").touch(0o755)
    assert horovod.for_cpus_only() is None


@pytest.mark.slow
@pytest.mark.parametrize("can", [(), ("--can",)])
def test_without_tools_it_says_so(monkeypatch, tmp_path, can):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [sys.executable, "-m", "tools.horovod", *can]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "without cmake" in refused.stderr and "Traceback" not in refused.stderr
    if can:
        for name in ("cmake", "make", "c++"):
            (tmp_path / name).touch(0o755)
        assert subprocess.run(command).returncode == 0


def test_choosing_it_is_one_clear_line():
    with pytest.raises(FluidTuneError, match='use "torch"'):
        fluidtune.FluidExecutor(backend="horovod")
    assert fluidtune.FluidExecutor().backend == "torch"


@pytest.mark.horovod
def test_the_doctor_says_what_it_was_built_with():
    _, good, text = doctor._horovod()
    assert good and "gloo" in text

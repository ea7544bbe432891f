"""What `fluidtune doctor` says of a machine: what is there, what is not there, and what is to be mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner

from fluidtune import doctor
from fluidtune.cli import cli

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("free, well", [(100, True), (51, True), (50, False), (0, False)])
def test_a_disk_on_which_ray_cannot_write(
    free: int, well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def usage(path: Any) -> Usage:
        looked.append(path)
        return Usage(1000 << 30, 0, free << 30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    name, found, text = doctor.disk_check("Ray", str(tmp_path / "not" / "there"))
    assert (name, found) == ("disk (Ray)", well) and f"{free}.0 of 1000 GiB" in text
    assert looked == [tmp_path]
    assert ("from 95% on" in text) is not well


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert doctor.disk_check("results", str(tmp_path))[1] is False
    assert "cannot be written" in doctor.disk_check("results", str(tmp_path))[2]


@pytest.mark.parametrize("size, well", [(None, None), (64 << 20, False), (1 << 30, True)])
def test_shared_memory(size: int | None, well: bool | None) -> None:
    name, found, text = doctor.memory_check(size)
    assert (name, found) == ("shared memory", well)
    assert ("--shm-size=1g" in text) is (well is False)


def test_what_is_not_there_is_neither_well_nor_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "checks", lambda: iter([("a", True, "x"), ("b", None, "y")]))
    done = CliRunner().invoke(cli, ["doctor"])
    assert (done.output, done.exit_code) == ("ok    a: x\n--    b: y\n", 0)
    monkeypatch.setattr(doctor, "checks", lambda: iter([("c", False, "z")]))
    done = CliRunner().invoke(cli, ["doctor"])
    assert (done.output, done.exit_code) == ("MISS  c: z\n", 1)


def test_no_mps_is_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor._mps()[1] is None


def test_no_cluster_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    name, found, text = doctor._cluster()
    assert (name, found) == ("cluster", None) and "a job begins one of its own" in text


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_the_cluster_that_a_job_would_join() -> None:
    code = "from fluidtune import doctor; print(*doctor._cluster(), sep='|')"
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "cluster|True|1 node, 2 CPUs, 0 GPUs; jobs join it", done.stderr

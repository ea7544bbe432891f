"""What `fluidtune doctor` says of a machine, also of GPUs played by a stand-in of NVML."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import ray
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.commands import doctor
from fluidtune.ray_compat import cluster_address
from tests.salus.test_telemetry import NVMLError, standin

Usage = namedtuple("Usage", "total used free")


def test_what_a_check_raises_is_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: `fluidtune doctor` ended with a traceback where torch lacks a library of CUDA's."""

    class Broken:
        def __getattr__(self, name: str) -> None:
            raise OSError("libcudart.so.12: cannot open shared object file")

    def lost() -> Iterator[doctor.Check]:
        yield "gpu", True, "2 on this machine"
        raise RuntimeError

    def lacks() -> doctor.Check:
        raise ModuleNotFoundError("No module named 'a'", name="a")

    def unlinked() -> doctor.Check:
        raise ImportError("libcudnn.so.9: cannot open\nand a dozen lines", name="a")

    def unmounted(path: Any) -> Usage:
        raise OSError("stale mount")

    torch = "cannot be checked, as something raises OSError: libcudart.so.12: cannot open shared object file"
    monkeypatch.setitem(sys.modules, "torch", Broken())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(shutil, "disk_usage", unmounted)
    found = {name: (well, text) for name, well, text in doctor.checks()}
    assert found["torch"] == (False, torch)
    assert found["memory"] == (False, "cannot be checked, as something raises OSError: stale mount")
    assert found["gpu"] == (None, "no telemetry (pynvml is not installed); type: pip install nvidia-ml-py")
    gpu = "cannot be checked, as something raises RuntimeError: no more is said"
    assert list(doctor.looked("a", lacks)) == [("a", False, "No module named 'a'; type: pip install a")]
    unlinks = "cannot be checked, as something raises ImportError: libcudnn.so.9: cannot open"
    assert list(doctor.looked("a", unlinked)) == [("a", False, unlinks)]
    assert list(doctor.looked("gpu", lost)) == [("gpu", True, "2 on this machine"), ("gpu", False, gpu)]


@pytest.mark.parametrize("free, well", [(100, True), (51, True), (50, False), (0, False)])
def test_a_disk_on_which_ray_cannot_write(
    free: int, well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def usage(path: Any) -> Usage:
        looked.append(path)
        return Usage(1000 << 30, 0, free << 30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    name, found, text = doctor.disk_check("Ray", str(tmp_path / "not" / "there"))
    assert (name, found) == ("disk (Ray)", well) and f"{free}.0 of 1000 GiB" in text
    assert looked == [str(tmp_path)]
    assert ("from 95% on" in text) is not well


@pytest.mark.parametrize("size, well", [(None, None), (64 << 20, False), (1 << 30, True)])
def test_shared_memory(size: int | None, well: bool | None) -> None:
    name, found, text = doctor.memory_check(size)
    assert (name, found) == ("shared memory", well)
    assert ("--shm-size=1g" in text) is (well is False)


def test_what_is_not_there_is_neither_well_nor_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "checks", lambda: iter([("a", True, "x"), ("b", None, "y")]))
    done = CliRunner().invoke(cli, ["doctor"])
    assert (done.output, done.exit_code) == ("ok    a: x\n--    b: y\n", 0)
    monkeypatch.setattr(doctor, "checks", lambda: [("c", False, "z")])
    done = CliRunner().invoke(cli, ["doctor"])
    assert (done.output, done.exit_code) == ("MISS  c: z\n", 1)
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert (json.loads(done.output), done.exit_code) == (
        {"version": 1, "checks": [{"name": "c", "found": False, "text": "z"}]},
        1,
    )


def test_what_takes_long_is_imported_while_a_cluster_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: beside a head node that hung, doctor took 7 s."""
    done: list[str] = []
    monkeypatch.setattr(cluster_address, "join", lambda meanwhile: done.extend(name for name, _, _ in meanwhile()))
    assert [name for name, _, _ in doctor._cluster()] == ["cluster"] and done == ["torch", "serve"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_the_cluster_that_a_job_would_join() -> None:
    code = "from fluidtune.commands import doctor; print(*doctor._cluster(), sep='|')"
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    cluster, quick = done.stdout.splitlines()[-1].split("|")
    assert cluster == "('cluster', True, '1 node, 2 CPUs, 0 GPUs; jobs join it')", done.stderr
    assert quick.startswith("('quick start', True, 'on all nodes")


TORCH = SimpleNamespace(
    version=SimpleNamespace(cuda="12.8"), distributed=SimpleNamespace(is_nccl_available=lambda: True)
)


def gpus(names=("A GPU",), cuda=13000, mode=0, mig=None, ecc=0, peers=0, dead=()):
    """pynvml on a machine with GPUs of these names, of which some are dead."""

    def handle(index):
        if index in dead:
            raise NVMLError("GPU is lost")
        return index

    def errors(gpu, kind, counter):
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return ecc

    return standin(
        **{name: value for name, value in vars(pynvml).items() if name.startswith("NVML_")},
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
        nvmlSystemGetDriverVersion=lambda: "580.65",
        nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}abc",
        nvmlDeviceGetName=lambda gpu: names[gpu],
        nvmlDeviceGetComputeMode=lambda gpu: mode,
        nvmlDeviceGetMigMode=NVMLError if mig is None else lambda gpu: mig,
        nvmlDeviceGetTotalEccErrors=errors,
        nvmlDeviceGetP2PStatus=lambda first, second, what: peers if what == pynvml.NVML_P2P_CAPS_INDEX_READ else -1,
    )


def checked(nvml=None, torch=TORCH, **environment):
    return list(doctor.gpu_checks(nvml or gpus(), torch, environment))


def test_a_machine_that_is_well():
    assert [(name, well) for name, well, _ in checked(gpus(("A", "A")))] == [
        ("cuda", True),
        ("visible gpus", True),
        ("peer access", True),
        ("nccl", True),
    ]


@pytest.mark.parametrize(
    ("change", "name", "well", "said"),
    [
        (dict(nvml=gpus(cuda=11080)), "cuda", False, "driver 580.65 for CUDA 11.8, torch for 12.8: install a driver"),
        (dict(torch=SimpleNamespace(version=SimpleNamespace(cuda=None))), "cuda", False, "a torch without CUDA"),
        (dict(torch=None), "cuda", False, "no torch"),
        (dict(CUDA_VISIBLE_DEVICES="0,7"), "visible gpus", False, "no GPU here is 7"),
        (dict(CUDA_VISIBLE_DEVICES="GPU-0a"), "visible gpus", True, "1 of 1"),
        (dict(CUDA_VISIBLE_DEVICES="GPU-9"), "visible gpus", False, "no GPU here is GPU-9"),
        (dict(CUDA_VISIBLE_DEVICES=""), "visible gpus", False, "0 of 1"),
        (dict(nvml=gpus(mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)), "gpu 0", False, "--max-packing 1"),
        (dict(nvml=gpus(mode=pynvml.NVML_COMPUTEMODE_PROHIBITED)), "gpu 0", False, "nvidia-smi -i 0 -c DEFAULT"),
        (dict(nvml=gpus(mig=(1, 1))), "gpu 0", True, "divided by MIG"),
        (dict(nvml=gpus(ecc=3)), "gpu 0", False, "3 uncorrected memory errors"),
        (dict(nvml=gpus(("A", "B"))), "kinds of gpus", False, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (dict(nvml=gpus(("A", "B")), CUDA_DEVICE_ORDER="PCI_BUS_ID"), "kinds of gpus", True, "as if all were alike"),
        (dict(nvml=gpus(("A", "A", "A"), peers=1)), "peer access", True, "3 pairs do not reach each other, as 0 and 1"),
        (dict(nvml=gpus(("A", "A"), dead=(1,))), "gpu 1", False, "does not answer (GPU is lost)"),
    ],
)  # fmt: skip
def test_what_is_found(change, name, well, said):
    found = [(how, what) for part, how, what in checked(**change) if part == name]
    assert len(found) == 1 and found[0][0] is well and said in found[0][1]


def test_a_machine_whose_only_gpu_is_lost():
    assert [name for name, _, _ in checked(gpus(dead=(0,)))] == ["gpu 0"]


def test_a_folder_that_may_not_be_looked_into_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HOME=/root under another user. Seen: `fluidtune doctor` ended with a traceback."""
    stat, access = os.stat, os.access

    def closed(path: Any, *given: Any, **named: Any) -> Any:
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *given, **named)

    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path) and access(path, mode))
    monkeypatch.setenv("HOME", str(tmp_path))
    name, well, text = doctor.disk_check("results", "~/ray_results")
    assert (name, well) == ("disk (results)", False)
    assert f"{tmp_path}/ray_results; it cannot be written: set RunConfig(storage_path=...)" in text


def test_without_a_home_the_disk_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: `fluidtune doctor` ended with a traceback."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    name, _, text = doctor.disk_check("results", "~/ray_results")
    assert name == "disk (results)" and "free for ~/ray_results" in text

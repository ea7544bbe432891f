"""The MPS daemon's manager, against a stand-in for NVIDIA's control program; for real where there is one."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from salus_share import SalusError, mps, telemetry
from salus_share.mps import Mps

STANDIN = str(Path(__file__).parent / "standin" / "nvidia-cuda-mps-control")
UUID = "GPU-5a1u5"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    log = tmp_path / "calls"
    log.touch()
    monkeypatch.setenv("MPS_STANDIN_LOG", str(log))
    monkeypatch.setattr(mps, "DEFAULT_PIPE", tmp_path / "nowhere")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(telemetry, "_said", set())
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_started_verified_and_stopped(tmp_path, calls) -> None:
    daemon = Mps("5a1u5", tmp_path / "gpu", STANDIN)
    assert daemon.acquire()
    started = [found for command, found in calls() if command == "-d"]
    assert started == [
        {
            "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "gpu" / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "gpu" / "log"),
            "CUDA_VISIBLE_DEVICES": UUID,
        }
    ]
    assert calls()[-1][0] == "get_server_list"
    daemon.release()
    assert calls()[-1][0] == "quit"
    assert daemon.environment() == {}


def test_shared_until_the_last_user_is_gone(tmp_path, calls) -> None:
    daemon = Mps(UUID, tmp_path / "gpu", STANDIN)
    assert daemon.acquire()
    users = tmp_path / "gpu" / "users"
    # Another process uses it too; and one that is dead.
    (users / "1").touch()
    (users / "999999999").touch()
    second = Mps(UUID, tmp_path / "gpu", STANDIN)
    assert second.acquire()
    assert [command for command, _ in calls()].count("-d") == 1
    daemon.release()
    assert [path.name for path in users.iterdir()] == ["1"]
    assert "quit" not in [command for command, _ in calls()]
    (users / "1").unlink()
    second.release()
    assert calls()[-1][0] == "quit"


@pytest.mark.parametrize("how", ["environment", "default"])
def test_a_daemon_that_is_there_is_used_and_left_alone(tmp_path, calls, monkeypatch, how) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "control").touch()
    if how == "environment":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(theirs))
    else:
        monkeypatch.setattr(mps, "DEFAULT_PIPE", theirs)
    daemon = Mps(UUID, tmp_path / "gpu", STANDIN)
    assert daemon.acquire()
    assert daemon.environment() == {"CUDA_MPS_PIPE_DIRECTORY": str(theirs), "CUDA_VISIBLE_DEVICES": UUID}
    daemon.release()
    assert {command for command, _ in calls()} == {"get_server_list"}
    assert (theirs / "control").exists()


def test_limits_of_a_client(tmp_path, calls) -> None:
    daemon = Mps(UUID, tmp_path / "gpu", STANDIN)
    daemon.acquire()
    found = daemon.environment(memory=4 << 30, threads=0.25)
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    for bad in ({"memory": -1}, {"threads": 0.0}, {"threads": 1.5}):
        with pytest.raises(SalusError, match="expected"):
            daemon.environment(**bad)
    daemon.release()


@pytest.mark.parametrize("why", ["missing", "refused"])
def test_without_mps_it_is_said_once(tmp_path, calls, monkeypatch, caplog, why) -> None:
    monkeypatch.setenv("MPS_STANDIN_FAIL", "MPS is not supported on this GPU")
    program = STANDIN if why == "refused" else "no-such-program"
    with caplog.at_level(logging.INFO):
        for name in ("one", "two"):
            daemon = Mps(UUID, tmp_path / name, program)
            assert not daemon.acquire()
            assert daemon.environment(memory=1 << 30) == {}
            daemon.release()
    (said,) = caplog.messages
    assert "time slices" in said
    assert ("not supported" in said) == (why == "refused")


def test_the_environment_comes_before_cuda(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SalusError, match="new process"):
        mps.apply({"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("SALUS_TEST", raising=False)
    mps.apply({"SALUS_TEST": "1"})
    assert os.environ.pop("SALUS_TEST") == "1"


@pytest.mark.mps
@pytest.mark.gpu
def test_the_real_daemon(tmp_path) -> None:
    import torch

    assert shutil.which(mps.CONTROL)
    daemon = Mps(str(torch.cuda.get_device_properties(0).uuid), tmp_path / "gpu")
    assert daemon.acquire()
    daemon.release()

"""The MPS daemon's manager, against a stand-in for NVIDIA's control program; for real where there is one."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from salus_share import SalusError, mps
from salus_share.mps import Mps
from salus_share.seat_table import started
from tests.contracts.processes import needs_root, until
from tests.salus.processes import Child, as_another_user, mps_server

STANDIN = str(Path(__file__).parent / "standin" / "nvidia-cuda-mps-control")
UUID = "GPU-5a1u5"


def daemon_of(directory: Path, uuid: str = UUID, usual: Path = Path("/nowhere")) -> Mps:
    return Mps(uuid, directory, STANDIN, usual)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    log = tmp_path / "calls"
    log.touch()
    monkeypatch.setenv("MPS_STANDIN_LOG", str(log))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_started_verified_and_stopped(tmp_path, calls) -> None:
    daemon = daemon_of(tmp_path / "gpu", "5a1u5")
    assert daemon.acquire()
    began = [found for command, found in calls() if command == "-d"]
    assert began == [
        {
            "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "gpu" / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "gpu" / "log"),
            "CUDA_VISIBLE_DEVICES": UUID,
        }
    ]
    # It answers, and a server of this user came up on the GPU.
    assert [command for command, _ in calls()][-2:] == [f"start_server -uid {os.getuid()}", "get_server_list"]
    assert daemon.environment(memory=4 << 30)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
    with pytest.raises(SalusError, match="expected"):
        daemon.environment(memory=-1)
    daemon.release()
    assert calls()[-1][0] == "quit"
    assert daemon.environment() == {}


def test_shared_until_the_last_user_is_gone(tmp_path, calls) -> None:
    daemon = daemon_of(tmp_path / "gpu")
    assert daemon.acquire()
    users = tmp_path / "gpu" / "users"
    # Another process uses it too; one that is dead, and one whose number is another's by now.
    other = f"1-{started(1)}"
    for user in (other, "999999999-5", f"{os.getppid()}-5"):
        (users / user).touch()
    second = daemon_of(tmp_path / "gpu")
    assert second.acquire()
    assert [command for command, _ in calls()].count("-d") == 1
    daemon.release()
    assert [path.name for path in users.iterdir()] == [other]
    assert "quit" not in [command for command, _ in calls()]
    (users / other).unlink()
    second.release()
    assert calls()[-1][0] == "quit"


@pytest.mark.parametrize(("owner", "used"), [(None, True), (0, True), ("own", True), ("another", False)])
def test_a_daemon_that_serves_another_user_is_left_to_him(tmp_path, calls, monkeypatch, owner, used) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "control").write_text("4242\n")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(theirs))
    owners = {"own": os.getuid(), "another": os.getuid() + 1}
    monkeypatch.setattr(mps, "_owner_of_server", lambda pid: owners.get(owner, owner) if pid == 4242 else 1)
    assert daemon_of(tmp_path / "gpu")._theirs() == (theirs if used else None)


def use(pipe, directory: Path) -> None:
    """A process that uses the GPU's daemon until it is killed."""
    pipe.send(daemon_of(directory).acquire())
    pipe.recv()


@pytest.mark.faults
def test_users_that_are_killed_leave_no_daemon(tmp_path, calls) -> None:
    control = tmp_path / "gpu" / "pipe" / "control"
    with Child(use, tmp_path / "gpu") as first, Child(use, tmp_path / "gpu") as second:
        assert first.told() and second.told()
        assert [command for command, _ in calls()].count("-d") == 1
        first.kill()
        first.process.join()
        # The guard lets the other one have it.
        assert second.silent(2 * mps.GUARD_S) and control.exists()
        second.kill()
    until(lambda: not control.exists())
    # Guard and daemon are back for the next one.
    with Child(use, tmp_path / "gpu") as third:
        assert third.told() and control.exists()
    until(lambda: not control.exists())


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_the_daemon_of_a_client_hears_that_it_is_to_be_ended(tmp_path, calls, monkeypatch, whose) -> None:
    gpu = tmp_path / "gpu"
    with mps_server(tmp_path) as server:
        monkeypatch.setenv("MPS_STANDIN_SERVER", str(server))
        if whose == "theirs":
            (tmp_path / "theirs").mkdir()
            (tmp_path / "theirs" / "control").write_text(f"{server}\n")
            monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "theirs"))
        daemon = daemon_of(gpu)
        assert daemon.acquire()
        ended = f"terminate_client {server} {os.getpid()}"
        mps.end_client(os.getppid(), tmp_path, STANDIN)
        assert "terminate_client" not in str(calls()), "another process is no client"
        mps.end_client(os.getpid(), tmp_path, STANDIN)
        assert calls()[-1] == [ended, calls()[-2][1]]
        assert calls()[-1][1]["CUDA_MPS_PIPE_DIRECTORY"] == str(daemon.pipe)
        mps.end_client(os.getpid(), tmp_path, STANDIN)
        assert [command for command, _ in calls()].count(ended) == 1
        # Its CUDA fails now; that is no reason to do without MPS.
        daemon.refuse("CUDA error: the client has been terminated")
        daemon.release()
        again = daemon_of(gpu)
        assert again.acquire()
        again.release()


@pytest.mark.parametrize("how", ["environment", "default"])
def test_a_daemon_that_is_there_is_used_and_left_alone(tmp_path, calls, monkeypatch, how) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "control").touch()
    if how == "environment":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(theirs))
    daemon = daemon_of(tmp_path / "gpu", usual=theirs)
    assert daemon.acquire()
    assert daemon.environment() == {"CUDA_MPS_PIPE_DIRECTORY": str(theirs), "CUDA_VISIBLE_DEVICES": UUID}
    daemon.release()
    assert {command for command, _ in calls()} == {"get_server_list"}
    assert (theirs / "control").exists()


@needs_root
def test_another_users_daemon_at_the_usual_place_is_not_asked(tmp_path, calls) -> None:
    usual = tmp_path / "usual"
    usual.mkdir()
    (usual / "control").touch()
    os.chown(usual, 65534, -1)
    daemon = daemon_of(tmp_path / "gpu", usual=usual)
    assert daemon.acquire()
    daemon.release()
    assert calls() and str(usual) not in str(calls())


@pytest.mark.parametrize("whose", ["ours", "the administrator's"])
def test_mps_is_not_used_where_another_user_has_made_our_directory(tmp_path, calls, monkeypatch, whose) -> None:
    (tmp_path / "gpu").mkdir()
    os.mkfifo(tmp_path / "gpu" / "refused")
    if whose != "ours":
        (tmp_path / "control").touch()
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    as_another_user(monkeypatch)
    daemon = daemon_of(tmp_path / "gpu")
    assert not daemon.acquire() and "belongs to" in str(daemon.why)
    assert daemon.environment() == {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "gpu" / "none")}
    assert not calls()


@pytest.mark.parametrize(
    ("why", "said"), [("missing", "no-such-program"), ("refused", "not supported"), ("no server", "no server came up")]
)
def test_without_mps_it_is_said_once_and_not_tried_again(tmp_path, calls, monkeypatch, caplog, why, said) -> None:
    monkeypatch.setattr(mps, "START_S", 0.2)
    failing = "MPS_STANDIN_NO_SERVER" if why == "no server" else "MPS_STANDIN_FAIL"
    monkeypatch.setenv(failing, f"not supported {tmp_path}")
    program = f"{tmp_path}/no-such-program" if why == "missing" else STANDIN
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            daemon = Mps(UUID, tmp_path / "gpu", program, tmp_path / "nowhere")
            assert not daemon.acquire()
            assert daemon.environment(memory=1 << 30) == {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "gpu" / "none")}
            daemon.release()
    (message,) = caplog.messages
    assert "time slices" in message and said in message
    assert not (tmp_path / "gpu" / "pipe" / "control").exists(), "a daemon that is of no use was left"
    assert [command for command, _ in calls()].count("-d") == (why != "missing")


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_daemon_under_which_cuda_does_not_start_is_not_tried_again(tmp_path, calls, monkeypatch, whose) -> None:
    if whose == "theirs":
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "control").touch()
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "theirs"))
    daemon = daemon_of(tmp_path / "gpu")
    assert daemon.acquire()
    daemon.refuse("CUDA error 805")
    daemon.release()
    without = daemon_of(tmp_path / "gpu")
    assert not without.acquire()
    # There is no daemon where it looks for one.
    assert not Path(without.environment()["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    os.utime(tmp_path / "gpu" / "refused", (0, 0))
    again = daemon_of(tmp_path / "gpu")
    assert again.acquire()
    again.release()


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

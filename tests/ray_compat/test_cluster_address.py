"""Commands look for the cluster that a job would join, and are answered within seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import cluster_address
from fluidtune.ray_compat.cluster_address import cluster_of_jobs, join, refuse_unjoinable


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which Ray keeps the address of a cluster of this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray"


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that takes connections and answers nothing, as a head node that hangs."""
    with socket.create_server(("", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_where_there_is_none(alone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cluster_of_jobs() is None and not join()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("by", ["ray start", "RAY_ADDRESS", "--address"])
def test_one_that_has_ended_or_hangs(
    by: str, silent: str, alone: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = {
        silent: "answers no client within 0.5 s",
        "127.0.0.1:1": "does not answer (",
        "x:1:2": " Ray cluster at x:1:2",
        "http://h:1": " at http://h:1",  # Seen: "at auto", and no remedy.
    }
    done: list[str] = []
    monkeypatch.setattr(cluster_address, "ANSWER_S", 0.5)
    for address, words in said.items():
        if by != "--address":
            (alone / "ray_current_cluster").write_text(address)
        if by == "RAY_ADDRESS":
            monkeypatch.setenv(by, address)
        with pytest.raises(FluidTuneError) as found:
            join(address if by == "--address" else "auto", meanwhile=partial(done.append, words))
        assert words in str(found.value)
        assert "http" not in address or "such as 10.0.0.1:6379" in str(found.value)
        assert ("RAY_ADDRESS is" in str(found.value)) == (by == "RAY_ADDRESS")
        ended = by == "ray start" and "does not answer" in str(found.value)
        assert (f"delete {alone / 'ray_current_cluster'}," in str(found.value)) == ended
        if ended and address == "127.0.0.1:1":
            with pytest.raises(FluidTuneError, match="it has ended; delete"):
                refuse_unjoinable()
        else:
            refuse_unjoinable()
    assert done == [said[silent]]
    assert capfd.readouterr() == ("", "")
    for address in ("ray://h:1", "a.module://h"):
        assert cluster_of_jobs(address) == address, "such addresses are for Ray to ask"


@pytest.mark.parametrize("file", ["", "/nowhere"])
def test_a_token_that_is_missing_is_named(file: str, silent: str, tmp_path: Path) -> None:
    """Seen: "answers no client within 3 s". A Ray without tokens says just that."""
    code = "import sys; from fluidtune.ray_compat.cluster_address import *; cluster_of_jobs(sys.argv[1])"
    given = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", **({"RAY_AUTH_TOKEN_PATH": file} if file else {})}
    done = subprocess.run([sys.executable, "-c", code, silent], env={**os.environ, **given}, capture_output=True)
    token = "this user has not its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH"
    has_tokens = (Path(ray.__file__).parent / "_private" / "authentication").is_dir()
    assert (token if has_tokens else "answers no client within 3 s") in done.stderr.decode()


OPEN, SHUT = ("", 0o777, GcsNodeInfo.ALIVE), ("sockets/raylet", 0o444, GcsNodeInfo.ALIVE)


@pytest.mark.parametrize(
    ("nodes", "refused"),
    [
        ([SHUT], True),
        ([("", 0o666, GcsNodeInfo.ALIVE)], True),
        ([("artifacts", 0o666, GcsNodeInfo.ALIVE)], True),
        ([SHUT, OPEN], False),
        ([SHUT, (*OPEN[:2], GcsNodeInfo.DEAD)], True),
    ],
)
def test_one_of_another_unix_user(
    nodes: list[tuple[str, int, int]], refused: bool, alone: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: Ray ended the process by SIGABRT; one's own was refused, as another's Ray had begun after it."""
    infos = {-1: GcsNodeInfo(raylet_socket_name="raylet"), -2: GcsNodeInfo(raylet_socket_name="/none/sockets/raylet")}
    monkeypatch.chdir(alone.parent)  # what is above it is root's alone
    alone.parent.chmod(0o755)
    for number, (path, mode, state) in enumerate(nodes):
        Path(f"{number}/{path}").mkdir(parents=True)
        Path(f"{number}/{path}").chmod(mode)
        infos[number] = GcsNodeInfo(raylet_socket_name=f"{number}/sockets/raylet", state=state)

    def client(address: str) -> Mock:
        if os.getuid() == 0:  # in the child that asks
            os.setuid(65534)
        return Mock(get_all_node_info=lambda: infos)

    monkeypatch.setattr(cluster_address, "GcsClient", client)
    for found, named in ((silent, ""), ("127.0.0.1:1", silent)):
        (alone / "ray_current_cluster").write_text(found)
        monkeypatch.setenv("RAY_ADDRESS", named)
        for ask in (cluster_of_jobs, refuse_unjoinable):
            with pytest.raises(FluidTuneError, match="another Unix user runs it, and 0 ") if refused else nullcontext():
                ask()


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_one_that_answers() -> None:
    address = ray.get_runtime_context().gcs_address
    code = "import sys; from fluidtune.ray_compat.cluster_address import *; print(cluster_of_jobs(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True)
    assert done.stdout.strip() == address, done.stderr

"""Commands look for the cluster that a job would join, and are answered within seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.cluster_address import cluster_of_jobs, join, refuse_ended


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
        silent: "answers no client within 3 s",
        "127.0.0.1:1": "does not answer (",
        "x:1:2": " Ray cluster at x:1:2",
        "http://h:1": " at http://h:1",  # Seen: "at auto", and no remedy.
    }
    done: list[str] = []
    for address, words in said.items():
        if by != "--address":
            (alone / "ray_current_cluster").write_text(address)
        if by == "RAY_ADDRESS":
            monkeypatch.setenv(by, address)
        with pytest.raises(FluidTuneError) as found:
            join(address if by == "--address" else "auto", meanwhile=partial(done.append, words))
        assert words in str(found.value)
        assert ("such as 10.0.0.1:6379" in str(found.value)) == (" at " in words)
        assert ("RAY_ADDRESS is" in str(found.value)) == (by == "RAY_ADDRESS")
        ended = by == "ray start" and "does not answer" in str(found.value)
        assert (f"delete {alone / 'ray_current_cluster'}," in str(found.value)) == ended
        if ended and address == "127.0.0.1:1":
            with pytest.raises(FluidTuneError, match="it has ended; delete"):
                refuse_ended()
        else:
            refuse_ended()
    assert done == [said[silent]]
    assert capfd.readouterr() == ("", "")
    assert cluster_of_jobs("ray://h:1") == "ray://h:1", "Ray Client's addresses are for Ray to ask"


@pytest.mark.parametrize("file", ["", "/nowhere"])
def test_a_token_that_is_missing_is_named(file: str, silent: str, tmp_path: Path) -> None:
    """Seen: "answers no client within 3 s". A Ray without tokens says just that."""
    code = "import sys; from fluidtune.ray_compat.cluster_address import *; cluster_of_jobs(sys.argv[1])"
    given = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", **({"RAY_AUTH_TOKEN_PATH": file} if file else {})}
    done = subprocess.run([sys.executable, "-c", code, silent], env={**os.environ, **given}, capture_output=True)
    token = "this user has not its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH"
    has_tokens = (Path(ray.__file__).parent / "_private" / "authentication").is_dir()
    assert (token if has_tokens else "answers no client within 3 s") in done.stderr.decode()


def test_one_of_another_unix_user(alone: Path, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: Ray ended the process by SIGABRT."""
    (alone / "ray_current_cluster").write_text(silent)
    (alone / "session_latest/sockets").mkdir(parents=True)
    (alone / "session_latest/sockets/raylet").touch()
    refuse_ended()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FluidTuneError, match="another Unix user runs it, and"):
        refuse_ended()


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_one_that_answers() -> None:
    address = ray.get_runtime_context().gcs_address
    code = "import sys; from fluidtune.ray_compat.cluster_address import *; print(cluster_of_jobs(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True)
    assert done.stdout.strip() == address, done.stderr

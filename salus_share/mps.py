"""NVIDIA MPS: one control daemon per GPU, so that processes share it without switching contexts.

Starts, verifies, shares and stops the daemon, and says which environment a client needs before CUDA starts. One
daemon per GPU, because a fatal fault of one client hits every client of its server. A daemon that is there already
(`CUDA_MPS_PIPE_DIRECTORY`, or NVIDIA's own default) is used and never stopped. Where MPS cannot be had, processes
take time slices; that is said once. What a client may do in its lane is not decided here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from salus_share.errors import SalusError
from salus_share.telemetry import say_once

CONTROL = "nvidia-cuda-mps-control"
#: Where NVIDIA's own scripts start it.
DEFAULT_PIPE = Path("/tmp/nvidia-mps")
#: How long a daemon may take to come up, and to answer, seconds.
START_S, ANSWER_S = 5.0, 10.0


class Mps:
    """The MPS daemon of the GPU ``uuid`` (as NVML and torch write it), for clients of this node.

    ``directory``: ours for this GPU; the daemon's pipes and logs lie below it. ``control``: the program.
    """

    def __init__(self, uuid: str, directory: Path, control: str = CONTROL) -> None:
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._directory = directory
        self._control = control
        self._ours = directory / "pipe"
        #: The pipe directory of the daemon that is used; None: there is none, and processes take time slices.
        self.pipe: Path | None = None

    def acquire(self) -> bool:
        """Use the GPU's daemon from now on, started if there is none. False: MPS cannot be had here."""
        given = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        for pipe in (Path(given) if given else None, DEFAULT_PIPE):
            if pipe is not None and pipe != self._ours and self._answers(pipe):
                self.pipe = pipe
                return True
        with self._users() as users:
            if self._answers(self._ours) or self._start():
                (users / str(os.getpid())).touch()
                self.pipe = self._ours
        return self.pipe is not None

    def release(self) -> None:
        """This process does not use it any more. Whoever is last stops the daemon, if it is ours."""
        if self.pipe == self._ours:
            with self._users() as users:
                (users / str(os.getpid())).unlink(missing_ok=True)
                for user in users.iterdir():
                    if not Path(f"/proc/{user.name}").exists():
                        user.unlink()
                if not any(users.iterdir()):
                    self._tell(self._ours, "quit")
        self.pipe = None

    def environment(self, *, memory: int | None = None, threads: float | None = None) -> dict[str, str]:
        """What a client must have in its environment before CUDA starts; nothing without a daemon.

        ``memory``: bytes that it may allocate on the device. ``threads``: part of the multiprocessors, 0 to 1; a
        client can only make it smaller later.
        """
        if self.pipe is None:
            return {}
        found = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_VISIBLE_DEVICES": self._uuid}
        if self.pipe == self._ours:
            found["CUDA_MPS_LOG_DIRECTORY"] = str(self._directory / "log")
        if memory is not None:
            if memory < 1 << 20:
                raise SalusError(f"memory is {memory!r}, expected bytes, at least a megabyte")
            # Device 0 of those that the client sees, and it sees one.
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory >> 20}M"
        if threads is not None:
            if not 0 < threads <= 1:
                raise SalusError(f"threads is {threads!r}, expected a part of the device, above 0 and at most 1")
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * threads:g}"
        return found

    def _start(self) -> bool:
        for name in ("pipe", "log"):
            (self._directory / name).mkdir(parents=True, exist_ok=True)
        environment = self._client(self._ours) | {
            "CUDA_MPS_LOG_DIRECTORY": str(self._directory / "log"),
            "CUDA_VISIBLE_DEVICES": self._uuid,
        }
        try:
            started = subprocess.run(
                [self._control, "-d"], env=environment, capture_output=True, text=True, timeout=ANSWER_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say_once(f"no MPS, processes take time slices of a GPU: {error}")
            return False
        deadline = time.monotonic() + START_S
        while started.returncode == 0 and time.monotonic() < deadline:
            if self._answers(self._ours):
                return True
            time.sleep(0.02)
        why = (started.stderr or started.stdout).strip() or f"the daemon does not answer within {START_S:.0f} s"
        say_once(f"no MPS, processes take time slices of a GPU: {why}")
        return False

    def _answers(self, pipe: Path) -> bool:
        """Whether a daemon with this pipe directory takes commands."""
        return pipe.is_dir() and self._tell(pipe, "get_server_list") is not None

    def _tell(self, pipe: Path, command: str) -> str | None:
        """What the daemon answers, None if there is none."""
        try:
            done = subprocess.run(
                [self._control],
                input=command + "\n",
                env=self._client(pipe),
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    @staticmethod
    def _client(pipe: Path) -> dict[str, str]:
        return {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}

    @contextlib.contextmanager
    def _users(self) -> Iterator[Path]:
        """The directory of our daemon's users, held against others that start or stop it."""
        users = self._directory / "users"
        users.mkdir(parents=True, exist_ok=True)
        with (self._directory / "users.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield users


def apply(environment: Mapping[str, str]) -> None:
    """Set a client's environment in this process. Raises SalusError if CUDA has started already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise SalusError("CUDA has started in this process; MPS must be in the environment before: use a new process")
    os.environ.update(environment)

"""NVIDIA MPS: one control daemon per GPU, so that processes share it without switching contexts.

Starts, verifies, shares and stops the daemon, and says which environment a client needs before CUDA starts. One
daemon per GPU, because a fatal fault of one client hits every client of its server. A daemon that is there already
(`CUDA_MPS_PIPE_DIRECTORY`, or NVIDIA's own default) is used and never stopped. Where MPS cannot be had, processes
take time slices; that is said once. What a client may do in its lane is not decided here.

Users are killed more often than they end, so nobody counts on `Mps.release`: with the daemon comes a guard, a small
process of nobody's that stops the daemon when no user lives any more.

    python -m salus_share.mps --uuid UUID --directory DIR
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from salus_share.errors import SalusError
from salus_share.memory import is_out_of_memory
from salus_share.seat_table import started
from salus_share.telemetry import say_once

CONTROL = "nvidia-cuda-mps-control"
#: Where NVIDIA's own scripts start it.
DEFAULT_PIPE = Path("/tmp/nvidia-mps")
#: How long a daemon, and its server, may take to come up, and to answer, seconds.
START_S, ANSWER_S = 10.0, 10.0
#: MPS that could not be had is not tried again for so long, seconds.
REFUSED_S = 600.0
#: How often the guard looks for users, and how long it keeps a daemon without any, seconds.
GUARD_S, IDLE_S = 0.5, 3.0


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
        #: Why there is none, in words.
        self.why: str | None = None

    def acquire(self) -> bool:
        """Use the GPU's daemon from now on, started if there is none. False: MPS cannot be had here."""
        self.why = self._refused()
        if self.why is None:
            self.pipe = self._theirs()
        if self.pipe is None:
            with self._users() as users:
                self.why = self._refused()
                if self.why is None and not self._answers(self._ours):
                    self.why = self._start()
                    if self.why is not None:
                        self._refusal.write_text(self.why)
                if self.why is None:
                    (users / _signature(os.getpid())).touch()
                    self._watch()
                    self.pipe = self._ours
        if self.why is not None:
            say_once(f"no MPS, processes take time slices of a GPU: {self.why}")
        return self.pipe is not None

    def release(self) -> None:
        """This process does not use it any more. Whoever is last stops the daemon, if it is ours."""
        if self.pipe == self._ours:
            with self._users() as users:
                (users / _signature(os.getpid())).unlink(missing_ok=True)
                if not _living(users):
                    self._tell(self._ours, "quit")
        self.pipe = None

    def refuse(self, why: str) -> None:
        """CUDA does not start under this daemon, whatever its control program says: for a while nobody tries."""
        with self._users():
            self._refusal.write_text(why)

    def guard(self) -> None:
        """Stop our daemon when no user of it lives any more. Returns then, or at once where another guard is."""
        with self._guard_lock() as only:
            if only is None:
                return
            last = time.monotonic()
            while self._directory.exists():
                with self._users() as users:
                    if _living(users):
                        last = time.monotonic()
                    elif time.monotonic() - last >= IDLE_S:
                        self._tell(self._ours, "quit")
                        # Who comes now starts daemon and guard anew.
                        fcntl.flock(only, fcntl.LOCK_UN)
                        return
                time.sleep(GUARD_S)

    def environment(self, *, memory: int | None = None) -> dict[str, str]:
        """What this process must have in its environment before CUDA starts: as a client, or not to be one.

        ``memory``: bytes that it may allocate on the device.
        """
        if self.pipe is None:
            # A daemon may be there all the same, of which no use shall be made.
            return {} if self.why is None else {"CUDA_MPS_PIPE_DIRECTORY": str(self._directory / "none")}
        found = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_VISIBLE_DEVICES": self._uuid}
        if self.pipe == self._ours:
            found["CUDA_MPS_LOG_DIRECTORY"] = str(self._directory / "log")
        if memory is not None:
            if memory < 1 << 20:
                raise SalusError(f"memory is {memory!r}, expected bytes, at least a megabyte")
            # Device 0 of those that the client sees, and it sees one.
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory >> 20}M"
        return found

    def _theirs(self) -> Path | None:
        """The pipes of a daemon that is there already, and not ours."""
        given = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        there = [Path(given), DEFAULT_PIPE] if given else [DEFAULT_PIPE]
        return next((pipe for pipe in there if pipe != self._ours and self._answers(pipe)), None)

    @property
    def _refusal(self) -> Path:
        return self._directory / "refused"

    def _refused(self) -> str | None:
        with contextlib.suppress(OSError):
            if time.time() - self._refusal.stat().st_mtime < REFUSED_S:
                return self._refusal.read_text()
        return None

    def _start(self) -> str | None:
        """Start our daemon, and a server of this user to see that it can have the GPU. Returns what is wrong."""
        for name in ("pipe", "log"):
            (self._directory / name).mkdir(parents=True, exist_ok=True)
        environment = self._client(self._ours) | {
            "CUDA_MPS_LOG_DIRECTORY": str(self._directory / "log"),
            "CUDA_VISIBLE_DEVICES": self._uuid,
        }
        try:
            began = subprocess.run(
                [self._control, "-d"], env=environment, capture_output=True, text=True, timeout=ANSWER_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if began.returncode != 0:
            return (began.stderr or began.stdout).strip() or f"{self._control} ended with status {began.returncode}"
        if not _within(START_S, lambda: self._answers(self._ours)):
            return f"the daemon does not answer within {START_S:.0f} s; see {self._directory / 'log'}"
        self._tell(self._ours, f"start_server -uid {os.getuid()}")
        if not _within(START_S, self._serves):
            self._tell(self._ours, "quit")
            return f"no server came up on {self._uuid} within {START_S:.0f} s; see {self._directory / 'log'}"
        return None

    def _watch(self) -> None:
        """See that there is a guard. It is nobody's child: it outlives us, and no one waits for it."""
        with self._guard_lock() as none:
            if none is None:
                return
        command = [sys.executable, "-m", "salus_share.mps", "--uuid", self._uuid, "--directory", str(self._directory)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with (self._directory / "guard.log").open("ab") as log:
            subprocess.run(
                [*command, "--control", self._control],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                check=False,
            )

    @contextlib.contextmanager
    def _guard_lock(self) -> Iterator[IO[str] | None]:
        """What the one guard holds; None where there is one."""
        with (self._directory / "guard.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield lock

    def _answers(self, pipe: Path) -> bool:
        """Whether a daemon with this pipe directory takes commands."""
        return pipe.is_dir() and self._tell(pipe, "get_server_list") is not None

    def _serves(self) -> bool:
        """Whether our daemon has a server: it lists their pids."""
        return any(line.strip().isdigit() for line in (self._tell(self._ours, "get_server_list") or "").splitlines())

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


def _signature(pid: int) -> str:
    """A process, told from a later one of the same number."""
    return f"{pid}-{started(pid)}"


def _living(users: Path) -> bool:
    """Whether any user lives; those who do not are forgotten."""
    for user in users.iterdir():
        if _signature(int(user.name.partition("-")[0])) != user.name:
            user.unlink()
    return any(users.iterdir())


def _within(seconds: float, what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_fault(error: BaseException) -> bool:
    """Whether CUDA failed in a way that ends every client of an MPS server, whoever caused it."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error) and not is_out_of_memory(error)


def apply(environment: Mapping[str, str]) -> None:
    """Set a client's environment in this process. Raises SalusError if CUDA has started already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise SalusError("CUDA has started in this process; MPS must be in the environment before: use a new process")
    os.environ.update(environment)


def main() -> None:
    """The guard's process."""
    parser = argparse.ArgumentParser(description="Stops a GPU's MPS daemon when no user of it lives any more.")
    parser.add_argument("--uuid", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--control", default=CONTROL)
    options = parser.parse_args()
    if os.fork() == 0:
        Mps(options.uuid, options.directory, options.control).guard()


if __name__ == "__main__":
    main()

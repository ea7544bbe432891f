"""NVIDIA MPS: one control daemon per GPU, so that processes share it without switching contexts.

`Mps` starts, verifies, shares and stops the daemon, and gives the environment that a client needs before CUDA starts.
There is one daemon per GPU, because a fatal fault of one client hits every client of its server. A daemon that runs
already (at `CUDA_MPS_PIPE_DIRECTORY`, or at NVIDIA's own default) is used and never stopped. Where MPS is not
available, processes take time slices, and the log says so once. What a client may do in its lane is not decided here.

Processes that use the daemon are killed more often than they end, so `Mps.release` is not relied on: the daemon comes
with a guard, a small detached process that stops the daemon when no process that uses it lives any more. Whoever kills
a client calls `end_client` before, on the client's node.

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
from salus_share.private_files import check_directory, open_own, own_directory, trusted_owner
from salus_share.seat_table import home, started
from salus_share.telemetry import say_once

#: The daemon's control program, by NVIDIA's documentation of MPS.
CONTROL = "nvidia-cuda-mps-control"
#: The pipe directory of a daemon that was started without CUDA_MPS_PIPE_DIRECTORY, by NVIDIA's documentation of MPS.
DEFAULT_PIPE = Path("/tmp/nvidia-mps")
#: How long a daemon or its server may take to come up, and to answer; seconds.
START_S, ANSWER_S = 10.0, 10.0
#: How long MPS is not tried again after it was not available, seconds: a try may cost a worker `START_S`.
REFUSED_S = 600.0
#: The folder, beside a daemon's pipes and logs, with a file for each client. It has the client's pipe directory; it is
#: empty once the client is being ended.
CLIENTS = "clients"
#: How often the guard looks for processes that use the daemon, and how long it keeps a daemon without any; seconds. A
#: trial's next worker comes within this time.
GUARD_S, IDLE_S = 0.5, 3.0


class Mps:
    """The MPS daemon of the GPU ``uuid`` (as NVML and torch write it), for clients on this node.

    ``directory``: for the pipes and logs of this GPU's daemon, if it is ours. ``control``: the control program.
    ``usual``: the pipe directory of a daemon that was started without a name for it.
    """

    def __init__(self, uuid: str, directory: Path, control: str = CONTROL, usual: Path = DEFAULT_PIPE) -> None:
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._directory = directory
        self._control, self._usual = control, usual
        self._ours = directory / "pipe"
        #: The pipe directory of the daemon that is used. None: there is no daemon, and processes take time slices.
        self.pipe: Path | None = None
        #: Why there is no daemon, as a text for the user.
        self.why: str | None = None

    def acquire(self) -> bool:
        """Use the GPU's daemon from now on; start it if there is none. Returns whether MPS is available here."""
        try:
            self.why = self._refused()
            if self.why is None:
                self.pipe = self._theirs()
            if self.pipe is None:
                self._share_ours()
            if self.pipe is not None:
                with self._users():
                    clients = _folder(self._directory / CLIENTS)
                    _living(clients)
                    (clients / _signature(os.getpid())).write_text(str(self.pipe))
        except SalusError as error:
            self.pipe, self.why = None, str(error)
        if self.why is not None:
            say_once(f"no MPS, processes take time slices of a GPU: {self.why}")
        return self.pipe is not None

    def _share_ours(self) -> None:
        """Be a user of our daemon, which is started if it does not run; ``why`` says why not."""
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

    def release(self) -> None:
        """Do not use the daemon any more. The last process that calls this stops the daemon, if it is ours."""
        if self.pipe == self._ours:
            with self._users() as users:
                (users / _signature(os.getpid())).unlink(missing_ok=True)
                if not _living(users):
                    self._tell(self._ours, "quit")
        self.pipe = None

    def refuse(self, why: str) -> None:
        """Record that CUDA does not start under this daemon: no process of this node tries it for `REFUSED_S`.

        Nothing is recorded if this process is being ended (`end_client`): CUDA fails then.
        """
        with self._users(), contextlib.suppress(FileNotFoundError):
            if not (self._directory / CLIENTS / _signature(os.getpid())).read_text():
                return
        with self._users():
            self._refusal.write_text(why)

    def guard(self) -> None:
        """Stop our daemon when no process that uses it lives any more. Returns then, or at once if there is a guard."""
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
                        # A process that comes now starts another daemon and guard.
                        fcntl.flock(only, fcntl.LOCK_UN)
                        return
                time.sleep(GUARD_S)

    def environment(self, *, memory: int | None = None) -> dict[str, str]:
        """What this process must have in its environment before CUDA starts, to be a client or not to be one.

        ``memory``: the bytes that it may allocate on the device, None for no limit. Raises SalusError below 1 MiB.
        """
        if self.pipe is None:
            # A daemon may run all the same. This keeps CUDA from using it.
            return {} if self.why is None else {"CUDA_MPS_PIPE_DIRECTORY": str(self._directory / "none")}
        found = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_VISIBLE_DEVICES": self._uuid}
        if self.pipe == self._ours:
            found["CUDA_MPS_LOG_DIRECTORY"] = str(self._directory / "log")
        if memory is not None:
            if memory < 1 << 20:
                raise SalusError(f"memory is {memory!r}, expected bytes, at least a megabyte")
            # The client sees one device, so its number is 0.
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory >> 20}M"
        return found

    def _theirs(self) -> Path | None:
        """The pipe directory of a daemon that runs already and is not ours; None if there is none."""
        given = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        there = [Path(given)] if given else []
        # Anybody may have made the usual one, while whoever set the variable has chosen the daemon.
        if trusted_owner(self._usual):
            there.append(self._usual)
        ready = (pipe for pipe in there if pipe != self._ours and self._answers(pipe))
        return next((pipe for pipe in ready if not self._serves_another(pipe)), None)

    def _serves_another(self, pipe: Path) -> bool:
        """Whether the daemon has a server of another user.

        NVIDIA's manual of the control program: a client of this user would then wait until that user's clients have all
        ended. The server of root may be one for all users, and is taken for that.
        """
        pids = [line.strip() for line in (self._tell(pipe, "get_server_list") or "").splitlines()]
        owners = [_owner_of_server(int(pid)) for pid in pids if pid.isdigit()]
        others = [owner for owner in owners if owner not in (None, 0, os.getuid())]
        if others:
            say_once(f"the MPS daemon at {pipe} is not used: it serves user {others[0]}, who would be waited for")
        return bool(others)

    @property
    def _refusal(self) -> Path:
        return self._directory / "refused"

    def _refused(self) -> str | None:
        """Why MPS is not tried now; None: it is. Raises SalusError if another user has made the directory."""
        own_directory(self._directory)
        with contextlib.suppress(OSError), _open_own(self._refusal) as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < REFUSED_S:
                return file.read()
        return None

    def _start(self) -> str | None:
        """Start our daemon, and a server to see that it gets the GPU. Returns what is wrong, None if nothing is."""
        for name in ("pipe", "log"):
            (self._directory / name).mkdir(parents=True, exist_ok=True)
        environment = _client(self._ours) | {
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
        """Start a guard if there is none. It is detached: it outlives this process, and is not waited for."""
        with self._guard_lock() as none:
            if none is None:
                return
        command = [sys.executable, "-m", "salus_share.mps", "--uuid", self._uuid, "--directory", str(self._directory)]
        with (self._directory / "guard.log").open("ab") as log:
            subprocess.run(
                [*command, "--control", self._control],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,
                check=False,
            )

    @contextlib.contextmanager
    def _guard_lock(self) -> Iterator[IO[str] | None]:
        """The file whose lock the one guard holds; None if another process holds it."""
        with (self._directory / "guard.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield lock

    def _answers(self, pipe: Path) -> bool:
        """Whether a daemon with this pipe directory answers."""
        return pipe.is_dir() and self._tell(pipe, "get_server_list") is not None

    def _serves(self) -> bool:
        """Whether our daemon has a server. It lists the pids of its servers."""
        return any(line.strip().isdigit() for line in (self._tell(self._ours, "get_server_list") or "").splitlines())

    def _tell(self, pipe: Path, command: str) -> str | None:
        return _tell(self._control, pipe, command)

    @contextlib.contextmanager
    def _users(self) -> Iterator[Path]:
        """The directory with a file for each user of our daemon, locked while the daemon may be started or stopped."""
        users = _folder(own_directory(self._directory) / "users")
        with (self._directory / "users.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield users


def end_client(pid: int, homes: Path | None = None, control: str = CONTROL) -> None:
    """Have MPS drop what the process ``pid`` of this node computes on a GPU, if it is a client of `Mps`.

    NVIDIA's manual of MPS: a client that is killed while it computes may leave the server and its other clients in an
    undefined state; the command `terminate_client` is for that. ``homes``: where `Mps` has its directories. What
    another user has made there is passed over.
    """
    homes = homes or home("any").parent
    for client in homes.glob(f"*/{CLIENTS}/{_signature(pid)}"):
        try:
            for folder in (homes, client.parents[1], client.parent):
                check_directory(folder)
            with _open_own(client) as file:
                pipe = file.read()
                file.truncate(0)
        except (SalusError, OSError):
            continue
        if not pipe:
            continue
        for server in (_tell(control, Path(pipe), "get_server_list") or "").split():
            # A daemon of another container has other numbers for processes: this one may be somebody else there.
            if server.isdigit() and _owner_of_server(int(server)) is not None:
                _tell(control, Path(pipe), f"terminate_client {server} {pid}")


def _tell(control: str, pipe: Path, command: str) -> str | None:
    """Send a command to a daemon. Returns its answer, None if there is no daemon."""
    try:
        done = subprocess.run(
            [control], input=command + "\n", env=_client(pipe), capture_output=True, text=True, timeout=ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _client(pipe: Path) -> dict[str, str]:
    return {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _open_own(path: Path) -> IO[str]:
    """This user's file, to be read and changed. Raises SalusError if it is another's, OSError if it is no file."""
    descriptor = open_own(path, os.O_RDWR | os.O_NONBLOCK)  # a pipe is not waited for
    return os.fdopen(descriptor, "r+")


def _owner_of_server(pid: int) -> int | None:
    """The user id of an MPS server; None: it runs outside of this container, so that its pid means nothing here."""
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        if (process / "comm").read_text().startswith("nvidia-cuda-mps"):  # Linux cuts the name at 15 letters
            return process.stat().st_uid
    return None


def _signature(pid: int) -> str:
    """A name of a process that no later process with its pid has."""
    return f"{pid}-{started(pid)}"


def _living(users: Path) -> bool:
    """Whether any user lives. The files of dead users are removed."""
    for user in users.iterdir():
        with contextlib.suppress(OSError):  # whoever cannot be looked at may live
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
    """Whether CUDA failed in a way that ends every client of an MPS server, whichever client caused it."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error) and not is_out_of_memory(error)


def apply(environment: Mapping[str, str]) -> None:
    """Set a client's environment in this process. Raises SalusError if CUDA has started already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise SalusError("CUDA has started in this process; set the environment of MPS before that, in a new process")
    os.environ.update(environment)


def main() -> None:
    parser = argparse.ArgumentParser(description="Stops a GPU's MPS daemon when no user of it is alive.")
    parser.add_argument("--uuid", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--control", default=CONTROL)
    options = parser.parse_args()
    if os.fork() == 0:
        Mps(options.uuid, options.directory, options.control).guard()


if __name__ == "__main__":
    main()

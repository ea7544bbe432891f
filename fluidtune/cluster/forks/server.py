"""The fork server: a process with packages imported that forks a new process for each request. One a node and job.

It is started by `fork_server` as a program, with the name of its socket. It reads from its standard input what it is to
import, imports it (`preload`), says so in one line on standard output, and listens. A request is a `fork_launcher`'s;
what the child makes of itself is in `child`. The server ends when its standard input does, which the process holds that
has started it. Its children live on.
"""

from __future__ import annotations

import gc
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from fluidtune.cluster.forks import child, preload
from fluidtune.cluster.forks.fork_launcher import THREADS
from fluidtune.cluster.forks.launched import Launched

#: The variables that the interpreter and the C library have read before any module's code runs: CPython's and glibc's
#: documented ones. A process whose values differ is none of this server's.
AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG")
#: They are taken over by the child after its start.
_TAKEN_OVER = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONBREAKPOINT"}
_TAKEN_OVER |= preload.MAY_DIFFER
#: Seconds that the server sleeps when it has no descriptor for another connection: the listener stays ready, and to ask
#: it again at once would take a core. Who asks meanwhile waits.
_FULL_S = 0.1
#: How often a server looks whether the one before it, of the same name, has ended, seconds.
_ENDING_S = 0.1


@dataclass
class _Launcher:
    """One connection. ``asking``: the launcher's process. ``pid``: the process that was forked for it."""

    connection: socket.socket
    asking: int
    pid: int | None = None


class Server:
    """See the module.

    ``name``: the socket's. ``environment``: that in which packages were imported. ``ending``: the descriptors by whose
    end others see that the server has ended.
    """

    def __init__(self, name: str, environment: Mapping[str, str], ending: Sequence[int]) -> None:
        self.name = name
        self._environment, self._ending = environment, ending
        #: How the names of variables begin that a process must have as the server has them.
        self._fixed = (*AT_START, *preload.reads())
        #: The names by which modules that were imported could be found in another place.
        self._names = {name for name in sys.modules if "." not in name}
        self._launchers: dict[int, _Launcher] = {}
        #: Processes that are to be killed: the child that ends what such a one computes under MPS -> that one.
        self._dying: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, listener: socket.socket) -> Launched | None:
        """Answer requests until standard input ends. Returns None then; in a child, what was asked for."""
        gc.collect()
        gc.freeze()
        wake, awake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(awake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is listener:
                    self._accept(listener)
                elif key.fileobj == wake:
                    with suppress(BlockingIOError):
                        os.read(wake, 4096)
                    self._reap()
                elif key.fileobj == 0:
                    if not os.read(0, 4096):
                        for pid in self._dying.values():
                            _kill(pid)
                        return None
                else:
                    request = self._hear(key.data)
                    if request is not None:
                        for descriptor in (listener.fileno(), wake, awake, self._selector.fileno()):
                            os.close(descriptor)
                        listener.detach()
                        return request

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = listener.accept()[0]
        except OSError:
            time.sleep(_FULL_S)
            return
        with suppress(OSError):
            connection.setblocking(False)
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, user, _ = struct.unpack("3i", peer)
            if user != os.geteuid() or not pid:  # 0: it is in another container
                connection.close()
                return
            self._selector.register(connection, selectors.EVENT_READ, _Launcher(connection, pid))

    def _hear(self, launcher: _Launcher) -> Launched | None:
        """Take what the launcher says. Returns its request in the child that was forked for it."""
        try:
            data, files, _, _ = socket.recv_fds(launcher.connection, 16, 3, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            data, files = b"", []
        try:
            if data and launcher.pid is None:
                return self._forked_for(launcher, files)
            self._lost(launcher)
            return None
        finally:
            for each in files:
                os.close(each)

    def _forked_for(self, launcher: _Launcher, files: Sequence[int]) -> Launched | None:
        """Fork what the launcher asks for. ``files``: its standard streams. Returns its request in the child."""
        try:
            request = Launched.by(launcher.asking, self.name)
            why = self._why_not(request, files)
            wait, go, pid = _forked() if why is None else (-1, -1, -1)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            why = f"the request cannot be read: {error}"
        except OSError as error:
            why = f"the fork server cannot fork one: {error}"
        if why is not None:
            self._answer(launcher, why)
            self._lost(launcher)
            return None
        if pid == 0:
            os.close(go)
            if not os.read(wait, 1):
                os._exit(0)  # its launcher has not heard of it, and starts a plain process, or has died
            os.close(wait)
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, _Launcher):
                    key.data.connection.close()
            for descriptor, file in enumerate(files):
                os.dup2(file, descriptor, inheritable=True)
            return request
        launcher.pid = pid
        self._launchers[pid] = launcher
        os.close(wait)
        with suppress(OSError):
            socket.send_fds(launcher.connection, [str(pid).encode()], [go])
        os.close(go)
        return None

    def _why_not(self, request: Launched, files: Sequence[int]) -> str | None:
        """Why no fork of this server is what a new process would be; None: one is."""
        if len(files) != 3:
            return "the fork server has no room for its open files"
        program = next((each for each in request.program if not each.startswith("-")), "")
        if not os.path.isfile(os.path.join(request.folder, program)):
            return f"{program!r} is no file"
        asked, own = request.environment, self._environment
        for name in {*asked, *own}:
            differs = name.startswith(self._fixed) and name not in _TAKEN_OVER and asked.get(name) != own.get(name)
            # Ray sets the number of threads before any code runs that is not Ray's own.
            if differs and not (name == THREADS and name not in asked):
                return f"{name} is {asked.get(name)!r} here and {own.get(name)!r} in the fork server"
        for folder in _search(asked) - _search(own):
            with suppress(OSError):
                hidden = self._names & {each.partition(".")[0] for each in os.listdir(folder or ".")}
                if folder and hidden:
                    return f"{folder} has another {min(hidden)}"
        return None

    def _answer(self, launcher: _Launcher, answer: str) -> None:
        with suppress(OSError):
            launcher.connection.sendall(answer.encode(errors="replace"))

    def _lost(self, launcher: _Launcher) -> None:
        """The launcher has gone, or needs nothing any more. Ray ends a worker by ending its launcher, too."""
        with suppress(KeyError):
            self._selector.unregister(launcher.connection)
        launcher.connection.close()
        if launcher.pid is not None and self._launchers.pop(launcher.pid, None) is not None:
            try:
                ending = os.fork()
            except OSError:
                _kill(launcher.pid)
                return
            if ending == 0:
                for descriptor in self._ending:  # it may live on when the server has ended
                    os.close(descriptor)
                _end_client(launcher.pid)
            self._dying[ending] = launcher.pid

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._dying:
                _kill(self._dying.pop(pid))
            # A number that is another process' by now is not killed.
            self._dying = {ending: dying for ending, dying in self._dying.items() if dying != pid}
            launcher = self._launchers.pop(pid, None)
            if launcher is not None:
                self._answer(launcher, f"{os.waitstatus_to_exitcode(status)}\n")
                self._lost(launcher)


def _forked() -> tuple[int, int, int]:
    """A pipe, both ends, and what `os.fork` returns. Raises OSError if there can be none, and leaves nothing then."""
    wait, go = os.pipe()
    try:
        return wait, go, os.fork()
    except OSError:
        os.close(wait)
        os.close(go)
        raise


def _search(environment: Mapping[str, str]) -> set[str]:
    return set(environment.get("PYTHONPATH", "").split(os.pathsep))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end_client(pid: int) -> NoReturn:
    """End what the process computes under MPS, in a child of the server. The server imports nothing for that."""
    with suppress(Exception):
        from salus_share.mps import end_client

        end_client(pid)
    os._exit(0)


def _bind(listener: socket.socket, name: str) -> bool:
    """Whether the name is this server's now. False: the machine has another server of the name, which answers until it
    ends: that of the job before, or of another Ray node of the same job."""
    with suppress(OSError):
        listener.bind(f"\0{name[1:]}")
        listener.listen(512)  # a burst of starts: the most processes that one job starts on a node at a time, and more
        return True
    return False


def main() -> None:
    """The program. `fork_server` has started it, writes what it is to import, and reads what it says."""
    # Neither a child of the worker that started it nor in its session: Ray ends what is either with the worker.
    if os.fork():
        os._exit(0)
    os.setsid()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # This process' environment before any import could change it.
    before = child.environment_at_start()
    failed: dict[str, str] = {}
    with os.fdopen(os.dup(0), "rb", buffering=0) as orders:
        # What needs no Ray comes first: Ray's compiled part reads the number of its job when it is loaded.
        for line in iter(orders.readline, b""):
            order = json.loads(line)
            before.update(order["environment"])
            os.environ.update(order["environment"])
            os.environ.update(preload.QUIET)
            failed |= preload.fill(order["names"])
            if order["last"]:
                break
        else:
            os._exit(0)  # its starter has ended
    why = preload.unfit()
    if why is not None:
        print(json.dumps({"unfit": why}), file=out, flush=True)
        os._exit(0)
    for quiet in preload.QUIET:
        os.environ.pop(quiet)
    name, listener = sys.argv[1], socket.socket(socket.AF_UNIX)
    server = Server(name, before, [out.fileno(), listener.fileno()])
    listener.setblocking(False)
    there = _bind(listener, name)  # not before, because `forked` asks the kernel whether there is a server
    print(json.dumps({"ready": len(sys.modules), "failed": failed, "pid": os.getpid()}), file=out, flush=True)
    while not there:
        if select.select([0], [], [], _ENDING_S)[0]:
            os._exit(0)
        there = _bind(listener, name)
    request = server.serve(listener)
    if request is None:
        os._exit(0)
    out.close()
    child.become(request, before, preload.reads())


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    main()

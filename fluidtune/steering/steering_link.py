"""The way of an act from a user's process to the driver: an abstract Unix socket whose name follows from the run.

Only processes on the driver's machine reach it, and each side asks the kernel whose process is at the other end
(SO_PEERCRED), so that only the run's user steers it and no other user answers in its place. The socket leaves no file
behind, also where the driver is killed. One line of JSON goes each way, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import queue
import socket
import socketserver
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from fluidtune.errors import FluidTuneError
from fluidtune.steering.acts import Act, Answer, Kind
from fluidtune.steering.json_values import LONGEST, cut, read_json
from salus_share.private_files import peer_user

#: Seconds that a driver may take for an act. It serves acts in each turn of Tune's loop, which takes 0.1 s, or longer
#: where a searcher thinks or a large state is saved. Judgement.
PATIENCE_S = 60.0
#: Seconds within which a process that has connected says what it wants: it is on this machine. Judgement.
_LINE_S = 10.0
#: The longest name of a trial, in characters, and of what else is a name. Judgement: Linux' for a path is 4,096.
_LONGEST_NAME = 4096
#: What comes when the run is over.
_ENDED = Answer(True, "the run has just ended")


def _address(run_dir: Path) -> str:
    where = f"{os.geteuid()}:{os.path.realpath(run_dir)}"
    return f"\0fluidtune-steer-{hashlib.sha256(where.encode()).hexdigest()[:32]}"


def act_from(said: Any, by: str) -> Act:
    """The act that a message means. Raises `ValueError` if it means none."""
    texts = ("id", "kind", "trial", "via")
    good = isinstance(said, dict) and all(isinstance(said.get(name), str) for name in texts)
    good = good and all(0 < len(said[name]) <= _LONGEST_NAME for name in texts)
    good = good and said["kind"] in get_args(Kind) and isinstance(said.get("from_checkpoint", False), bool)
    if not good or not isinstance(said.get("parameters"), dict):
        raise ValueError(f"this is no act: {cut(str(said))}")
    more = {"parameters": said["parameters"], "from_checkpoint": said.get("from_checkpoint", False)}
    return Act(**{name: said[name] for name in texts}, by=by, **more)


@dataclass(frozen=True)
class Request:
    """An act that somebody waits for. `answer` must be called once."""

    act: Act
    _answered: Future[Answer]

    def answer(self, answer: Answer) -> None:
        self._answered.set_result(answer)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    link: SteeringLink


class _Handler(socketserver.StreamRequestHandler):
    timeout = _LINE_S
    server: _Server

    def handle(self) -> None:
        uid = peer_user(self.connection)
        if uid != os.geteuid():
            return
        try:
            act = act_from(read_json(self.rfile.readline(LONGEST)), _name_of(uid))
            answer = self.server.link.ask(act).result()
        except ValueError as error:
            answer = Answer(True, str(error))
        except OSError:
            return  # the asker has gone
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(asdict(answer)).encode() + b"\n")


class SteeringLink:
    """The driver's end. ``run_dir``: the directory of its event log.

    Raises:
        OSError: another driver of this run listens, or this system has no such sockets.
    """

    def __init__(self, run_dir: Path) -> None:
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        #: Guards that nothing is queued once the link is closed.
        self._lock = threading.Lock()
        self._closed = False
        self._server = _Server(_address(run_dir), _Handler)
        self._server.link = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="steering", daemon=True)
        self._thread.start()

    def requests(self) -> Iterator[Request]:
        """What was asked for and has no answer yet."""
        while not self._requests.empty():
            yield self._requests.get()

    def ask(self, act: Act) -> Future[Answer]:
        """Queue an act. Returns what its answer will be; a closed link refuses it."""
        request = Request(act, Future())
        with self._lock:
            if self._closed:
                request.answer(_ENDED)
            else:
                self._requests.put(request)
        return request._answered

    def close(self) -> None:
        """Hear nothing more, and refuse what has no answer yet, also of those who have connected and not spoken."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._lock:
            self._closed = True
        for request in self.requests():
            request.answer(_ENDED)


def send(run_dir: Path, act: Act) -> Answer:
    """Ask the run's driver, and return its answer.

    Raises:
        OSError: no driver listens.
        EOFError: the driver ended before it answered.
        FluidTuneError: the act is too long, another user's process listens there, or the driver did not answer in time.
    """
    message = json.dumps(asdict(act)).encode() + b"\n"
    if len(message) > LONGEST:
        raise FluidTuneError(f"the act is too long: it has {len(message)} bytes, of at most {LONGEST}")
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE_S)
        link.connect(_address(run_dir))
        uid = peer_user(link)
        if uid != os.geteuid():
            raise FluidTuneError(f"{_name_of(uid)} answers in the place of this run's driver; nothing was sent")
        link.sendall(message)
        try:
            with link.makefile("rb") as answer:
                line = answer.readline(LONGEST)
        except TimeoutError:
            raise FluidTuneError(
                f"the driver has not answered for {PATIENCE_S:.0f} s, and may do it yet: see fluidtune why"
            )
    if not line:
        raise EOFError("the driver ended before it answered")
    return Answer(**json.loads(line))


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def own_name() -> str:
    """This process' user."""
    return _name_of(os.geteuid())

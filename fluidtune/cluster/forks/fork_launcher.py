"""What Ray runs in place of Python: it has the fork server start the process, and ends as that process ends.

``PYTHON -I -S fork_launcher.py SOCKET PROGRAM [ARGUMENTS]``. Ray gives it a new worker's environment, working directory
and files; it hands all of them to the server and waits. Where there is no server, or the server does not start the
process, this process becomes ``PYTHON PROGRAM ARGUMENTS``, as it would have been without a server. It is a program of
its own that imports nothing but a little of Python's: it runs once for every process.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys

#: Seconds within which the server must have answered. A fork takes some 10 ms; 200 that are asked for at once were
#: answered within 5 s on two busy cores. Ray gives a worker 60 s to register.
PATIENCE_S = 20.0
#: How soon the kernel kills a process when memory is full (proc(5)): -1000 to 1000, 0 by default. Ray's workers have
#: 1000.
OOM_SCORE = "/proc/self/oom_score_adj"


def main() -> None:
    """See the module."""
    path, program = sys.argv[1], sys.argv[2:]
    try:
        server, pid = _ask(path, program)
    except (OSError, ValueError) as error:
        print(f"fluidtune: a plain new process, because the fork server did not answer: {error}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *program])
    if pid is None:
        os.execv(sys.executable, [sys.executable, *program])
    os._exit(_wait(server, pid))


def _ask(path, program):
    """Have the server start the process. Returns the connection and the process' id; None: the server will not."""
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(PATIENCE_S)
    server.connect(path)
    peer = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if peer[1] != os.geteuid():
        raise ValueError(f"the socket {path} is user {peer[1]}'s")
    request = json.dumps(
        {
            "program": program,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": _umask(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score": _oom_score(),
            "cores": sorted(os.sched_getaffinity(0)),
            "limits": [[which, *resource.getrlimit(which)] for which in _limits()],
        }
    ).encode()
    # The length goes with the files: the server knows from it when it has everything.
    socket.send_fds(server, [struct.pack("Q", len(request))], [0, 1, 2])
    server.sendall(request)
    said, files, _, _ = socket.recv_fds(server, 4096, 1)
    answer = json.loads(said or b"?")
    if answer["pid"] is None:
        print(f"fluidtune: a plain new process: {answer['why']}", file=sys.stderr)
    else:
        # The process has Ray's score from now on. This one holds no memory, and the process would end with it.
        with contextlib.suppress(OSError), open(OOM_SCORE, "w") as file:
            file.write("0")
    for go in files:
        os.write(go, b"!")  # the process waits for that: so it runs once, whatever dies meanwhile
        os.close(go)
    return server, answer["pid"]


def _oom_score():
    with open(OOM_SCORE) as file:
        return file.read()


def _line(server):
    """One line that the server says."""
    found = b""
    while not found.endswith(b"\n"):
        piece = server.recv(4096)
        if not piece:
            raise ValueError("it ended")
        found += piece
    return found


def _umask():
    found = os.umask(0o077)
    os.umask(found)
    return found


def _limits():
    return [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def _wait(server, pid):
    """Wait for the end of the process; pass on the signals that ask for it. Returns this process' exit status."""

    def pass_on(number, frame):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    try:
        process = os.pidfd_open(pid)
    except OSError:
        process = None  # it has ended, or this kernel is older than 5.3
    server.settimeout(None)
    try:
        status = json.loads(_line(server))["status"]
        return status if status >= 0 else 128 - status
    except (OSError, ValueError):
        pass  # the server has died; the process lives on
    if process is not None:
        select.select([process], [], [])
    return 0


if __name__ == "__main__":
    main()

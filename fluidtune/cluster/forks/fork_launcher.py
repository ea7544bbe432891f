"""What Ray runs in place of Python: it has the fork server start the process, and ends as that process ends.

Ray starts it in one of two ways:

- On a quick node (`quick_nodes`) in place of Ray's own ``setup_worker.py``, by ``main(PATH OF THAT)``. Where Ray's
  context names a server, that one is asked at once.
- On other nodes as ``PYTHON -I -S fork_launcher.py SERVER PROGRAM [ARGUMENTS]``, when Ray's own program has imported
  Ray and read the context.

It hands the server its standard streams, and waits. What else the process needs, the server reads of this one
(`launched`). Where there is no server, or the server does not start the process, it becomes what it would have been:
Ray's own program, or ``PYTHON PROGRAM ARGUMENTS``. It runs once for every process, so it imports the parts of Python's
that are built in, and not their wrappers: `json`, `socket` and `signal` take longer than Python's own start.
"""

import _signal
import _socket
import os
import select
import sys

#: The name of a server's socket begins so, and as many hexadecimal digits follow. It is in Linux' abstract namespace
#: (unix(7)), where "@" stands for a zero byte: there is no file, and it goes with the server.
PREFIX, DIGITS = "@fluidtune-forks-", 16
#: The argument by which Ray says what a runtime environment needs.
CONTEXT = "--serialized-runtime-env-context="
#: Seconds within which the server must have answered. A fork takes some 10 ms; 200 that are asked for at once were
#: answered within 5 s on two busy cores. Ray gives a worker 60 s to register.
PATIENCE_S = 20.0
#: How soon the kernel kills a process when memory is full (proc(5)): -1000 to 1000, 0 by default. Ray's workers have
#: 1000.
OOM_SCORE = "/proc/self/oom_score_adj"
#: The variable by which libraries know how many threads to have, and what it is to be in the process unless it is set.
THREADS, THREADS_UNLESS_SET = "OMP_NUM_THREADS", "FLUIDTUNE_THREADS"


def main(rays=None):
    """See the module. ``rays``: the path of Ray's own program, whose arguments this process has; None: its own."""
    name, plain = (sys.argv[1], sys.argv[2:]) if rays is None else (_named(sys.argv), [rays, *sys.argv[1:]])
    if name is not None:
        try:
            server, pid = _ask(name)
            os._exit(_wait(server, pid))
        except (OSError, ValueError) as error:
            if rays is None:
                print(f"fluidtune: a plain new process: {error}", file=sys.stderr, flush=True)
    if THREADS_UNLESS_SET in os.environ:
        os.environ.setdefault(THREADS, os.environ.pop(THREADS_UNLESS_SET))
    os.execv(sys.executable, [sys.executable, *plain])


def _named(arguments):
    """The first server's name in Ray's context; None: there is none.

    The server reads the context whole, and does nothing where the word means something else.
    """
    context = next((each for each in arguments if each.startswith(CONTEXT)), "")
    begin = context.find(PREFIX)
    return context[begin : begin + len(PREFIX) + DIGITS] if begin >= 0 else None


def _ask(name):
    """Have the server start the process. Returns the connection and the process' id. ValueError: it will not."""
    server = _socket.socket(_socket.AF_UNIX)
    server.settimeout(PATIENCE_S)
    try:
        server.connect(f"\0{name[1:]}")
    except OSError as error:
        raise ValueError(f"the fork server did not answer: {error}") from None
    peer = server.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    pid, user = (int.from_bytes(peer[at : at + 4], sys.byteorder) for at in (0, 4))
    if user != os.geteuid() or not pid:  # 0: it is in another container
        raise ValueError(f"the fork server did not answer: the socket {name} is user {user}'s, process {pid}")
    streams = b"".join(each.to_bytes(4, sys.byteorder) for each in range(3))
    server.sendmsg([b"?"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    said, files, _, _ = server.recvmsg(4096, _socket.CMSG_SPACE(4))
    if not files:
        raise ValueError(said.decode(errors="replace") or "the fork server did not answer: it ended")
    # The process has Ray's score from now on. This one holds no memory, and the process would end with it.
    try:
        with open(OOM_SCORE, "w") as file:
            file.write("0")
    except OSError:
        pass
    go = int.from_bytes(files[0][2][:4], sys.byteorder)
    os.write(go, b"!")  # the process waits for that: so it runs once, whatever dies meanwhile
    os.close(go)
    return server, int(said)


def _wait(server, pid):
    """Wait for the end of the process; pass on the signals that ask for it. Returns this process' exit status."""

    def pass_on(number, frame):
        try:  # contextlib takes as long to import as all that is imported here
            os.kill(pid, number)
        except ProcessLookupError:
            return

    for number in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP):
        _signal.signal(number, pass_on)
    try:
        process = os.pidfd_open(pid)
    except OSError:
        process = None  # it has ended, or this kernel is older than 5.3
    server.settimeout(None)
    said = b""
    try:
        while not said.endswith(b"\n"):
            piece = server.recv(4096)
            if not piece:
                break
            said += piece
    except OSError:
        pass
    if said.endswith(b"\n"):
        status = int(said)
        return status if status >= 0 else 128 - status
    # The server has died; the process lives on.
    if process is not None:
        select.select([process], [], [])
    return 0


if __name__ == "__main__":
    main()

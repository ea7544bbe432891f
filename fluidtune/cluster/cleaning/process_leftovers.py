"""What a trial can leave in its process that is no setting: threads, processes, open files, ports, memory.

It decides nothing but what counts. Who finds something replaces the process.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from fluidtune.cluster.sharing.gpu_probe import GpuProbe, torch_on_gpu
from fluidtune.cluster.sharing.lanes import is_lane_service

#: Bytes by which a process may have grown since its first trial was loaded. Allocators and caches of libraries keep
#: hundreds of MiB, which the next trial uses again.
MEMORY_ALLOWANCE = 1 << 30
#: Bytes that come to these where the process computes on a GPU. Reports of torch's users have 0.4 to 2 GB of host
#: memory for CUDA, cuBLAS and cuDNN (pytorch issues 12873 and 113326), which start after the size was noted.
CUDA_ALLOWANCE = 2 << 30
#: Bytes of GPU memory that torch's allocator may hold after its cache was emptied. The workspaces of CUDA's libraries
#: take tens of MiB; a trial's model takes more.
GPU_MEMORY_ALLOWANCE = 64 << 20
#: Bytes of GPU memory that a process may hold, by NVML, besides what torch's allocator has. A CUDA context with the
#: kernels of torch takes 300 to 600 MiB; another framework keeps most of the GPU.
GPU_PROCESS_ALLOWANCE = 1 << 30
#: Seconds that threads which are ending may take.
GRACE_S = 0.5
#: How the names of threads begin that libraries start once per process, and that hold nothing of a trial.
HARMLESS_THREADS = ("ray_", "Dummy-", "tqdm", "TMonitor", "pymp", "asyncio_", "IOThread", "AsyncIO", "fluid-")
#: The state of a listening socket in /proc/net/tcp: TCP_LISTEN of Linux's include/net/tcp_states.h, in hex.
_LISTENING = "0A"


class Leftovers:
    """What was there before the first trial's code ran."""

    def __init__(self) -> None:
        self._threads = {t.ident for t in threading.enumerate()}
        self._children = {p.pid for p in _children()}
        self._rss: int | None = None
        open_now = _descriptors()
        self._sockets, self._files = _sockets(open_now), set(_files_open_for_writing(open_now))
        #: Folders of the process' own output: Ray opens further log files there.
        self._logs = {os.path.dirname(open_now[fd]) for fd in (1, 2) if open_now.get(fd, "").startswith("/")}
        self._gpu = GpuProbe()

    def note_size(self) -> None:
        """Note the process' size, once: when a trial's modules are imported and its code has not run."""
        if self._rss is None:
            self._rss = _own_memory()

    def found(self) -> str | None:
        """What a trial has left, in words; None: nothing. Threads that are ending are waited for."""
        open_now = _descriptors()
        return (
            self._children_left()
            or self._ports_left(open_now)
            or self._files_left(open_now)
            or self._memory_left()
            or self._threads_left()
        )

    def _children_left(self) -> str | None:
        left = [str(p.pid) for p in _children() if p.pid not in self._children and _runs_for_a_trial(p)]
        return f"processes left running: {', '.join(left)}" if left else None

    def _ports_left(self, open_now: dict[int, str]) -> str | None:
        new = _sockets(open_now) - self._sockets
        # Ray opens sockets all the time, and gloo keeps a port for later groups of an elastic trial. Python knows only
        # those of Python code.
        objects = gc.get_objects() if new else ()
        sockets = [each.fileno() for each in objects if issubclass(type(each), socket.socket)]
        left = {open_now[each] for each in sockets if each in open_now} & new
        ports = _ports(left)
        if ports:
            return f"ports left open: {', '.join(ports)}"
        return f"sockets left open: {len(left)}" if left else None

    def _files_left(self, open_now: dict[int, str]) -> str | None:
        known = {fd for fd, path in open_now.items() if path in self._files or os.path.dirname(path) in self._logs}
        new = {descriptor: path for descriptor, path in open_now.items() if descriptor not in known}
        left = {path for path in _files_open_for_writing(new) if os.path.isfile(path)}
        return f"files left open: {', '.join(sorted(left)[:3])}" if left else None

    def _memory_left(self) -> str | None:
        torch = torch_on_gpu()
        grown = 0 if self._rss is None else _own_memory() - self._rss
        if grown > MEMORY_ALLOWANCE + (CUDA_ALLOWANCE if torch is not None else 0):
            return f"memory left behind: {grown >> 20} MiB more than when it was new"
        held = 0 if torch is None else torch.cuda.memory_allocated()
        if held > GPU_MEMORY_ALLOWANCE:
            return f"GPU memory left behind: {held >> 20} MiB"
        others = (self._gpu.memory_of_process(os.getpid()) or 0) - (torch.cuda.memory_reserved() if torch else 0)
        if others > GPU_PROCESS_ALLOWANCE:
            return f"GPU memory left behind: {others >> 20} MiB that are not torch's"
        return None

    def _threads_left(self) -> str | None:
        deadline = time.monotonic() + GRACE_S
        while True:
            new = [each.name for each in threading.enumerate() if each.ident not in self._threads]
            left = sorted(name for name in new if not name.startswith(HARMLESS_THREADS))
            if not left or time.monotonic() > deadline:
                return f"threads left running: {', '.join(left)}" if left else None
            time.sleep(0.01)


def _own_memory(status: str = "/proc/self/status") -> int:
    """Bytes of memory that is this process' own, without the pages of libraries' files."""
    with suppress(OSError, StopIteration):
        lines = Path(status).read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10
    return int(psutil.Process().memory_info().rss)


def _children() -> list[psutil.Process]:
    """The child processes of this process, those that have ended included.

    psutil looks at all processes of the machine for that. The kernel says at once whether there are any: waitid(2).
    """
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # takes no child's status away
        except ChildProcessError:
            return []
    return psutil.Process().children()


def _runs_for_a_trial(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not is_lane_service(process)
    except psutil.NoSuchProcess:
        return False


def _descriptors() -> dict[int, str]:
    """The file descriptors of this process, each with its path, or "socket:[inode]" and its like; {} without /proc."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was closed
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _sockets(descriptors: dict[int, str]) -> set[str]:
    return {target for target in descriptors.values() if target.startswith("socket:[")}


def _ports(sockets: set[str]) -> list[str]:
    """The TCP ports on which these sockets listen; none where there is no /proc."""
    found: set[str] = set()
    for table in ("tcp", "tcp6") if sockets else ():
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                    found.add(str(int(fields[1].rpartition(":")[2], 16)))
    return sorted(found)


def _files_open_for_writing(descriptors: dict[int, str]) -> list[str]:
    """The paths of regular files among these that are open for writing."""
    found = []
    for descriptor, target in descriptors.items():
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/memfd:")):
            with suppress(OSError, ValueError, StopIteration):
                lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
                flags = int(next(line for line in lines if line.startswith("flags:")).split()[1], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    found.append(target)
    return found

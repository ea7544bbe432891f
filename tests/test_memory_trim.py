"""Freed memory is taken again by any thread, or given back once a minute, and more seldom where that takes long."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from fluidtune.memory_trim import EVERY_S, PAUSE, MemoryTrim


def test_it_trims_once_a_minute_and_at_most_a_thousandth_of_the_time() -> None:
    now, trims, takes = 0.0, list[float](), 0.0

    def trim() -> None:
        nonlocal now
        trims.append(now)
        now += takes

    memory = MemoryTrim(trim, lambda: now)
    for _ in range(3000):
        memory.now_and_then()
        now += 0.1
    assert len(trims) == 4 and trims[0] >= EVERY_S
    takes, before, end = 1.0, len(trims), now + 1.5 * PAUSE
    while now < end:
        memory.now_and_then()
        now += 0.1
    assert len(trims) == before + 2 and trims[-1] - trims[-2] >= PAUSE, "the next one waits for a thousand seconds"


#: Each of four threads that live at the same time takes and frees 24 MiB in its turn, and keeps its last block.
CHURN = """
import ctypes, threading
from fluidtune.memory_trim import MemoryTrim, one_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
all_there, turn = threading.Barrier(5), threading.Lock()
def churn():
    libc.malloc(100)
    all_there.wait()
    with turn:
        blocks = [libc.malloc(60_000) for _ in range(400)]
        for block in blocks:
            ctypes.memset(block, 1, 60_000)
        for block in blocks[:-1]:
            libc.free(block)
    all_there.wait()
def run():
    threads = [threading.Thread(target=churn) for _ in range(4)]
    for each in threads: each.start()
    all_there.wait(), all_there.wait()
def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4 >> 10
"""


@pytest.mark.parametrize(
    "run", ["one_heap(); run()", "run(); MemoryTrim(clock=iter([-99.0, 0.0, 0.0]).__next__).now_and_then()"]
)
def test_what_threads_have_freed_is_taken_again_or_given_back(run: str) -> None:
    def held(code: str) -> int:
        said = subprocess.run(
            [sys.executable, "-c", CHURN + code + "; print(held())"], capture_output=True, text=True, check=True
        )
        return int(said.stdout.split()[-1])

    # Where the C library has neither call, nothing is changed.
    assert held("run()") - held(run) > 10 or not hasattr(ctypes.CDLL(None), "mallopt")

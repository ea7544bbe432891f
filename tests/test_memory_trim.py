"""Freed memory is given back once a minute, and more seldom where that takes long."""

from __future__ import annotations

import ctypes
import gc
import threading

import psutil

from fluidtune import memory_trim
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


def test_what_threads_have_freed_is_given_back() -> None:
    """Blocks below the size that is mapped by itself, freed but for the last of each thread."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    kept: list[int] = []

    def churn() -> None:
        blocks = [libc.malloc(60_000) for _ in range(400)]
        for block in blocks:
            ctypes.memset(block, 1, 60_000)
        kept.append(blocks[-1])
        for block in blocks[:-1]:
            libc.free(block)

    for _ in range(4):
        thread = threading.Thread(target=churn)
        thread.start()
        thread.join()
    gc.collect()
    before = psutil.Process().memory_info().rss
    memory_trim._trim()
    # Where the C library has no such call, it does nothing.
    assert before - psutil.Process().memory_info().rss > 10 * 2**20 or not hasattr(libc, "malloc_trim")
    for block in kept:
        libc.free(block)

"""Random generators that began from entropy while the fork server imported packages.

In a new process each would have begun with other numbers, so each child begins them anew. Those that a package made
with a seed of its own stay as they are.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: A seed that numpy has drawn is a number of 128 bits (``SeedSequence``). Judgement: nobody writes one of 64 by hand.
_DRAWN = 1 << 64


class Generators:
    """Those of Python's `random.Random` and of numpy's ``Generator`` and ``RandomState``, the global ones apart.

    And numpy's ``SeedSequence``, from which generators are spawned.
    """

    def __init__(self) -> None:
        self._of_python: list[weakref.ref[random.Random]] = []
        #: Their bit generators.
        self._of_numpy: list[Any] = []
        self._seeds: list[Any] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note those that begin meanwhile."""
        seed = random.Random.seed

        def noting(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None:
                self._of_python.append(weakref.ref(generator))
            seed(generator, a, version)

        random.Random.seed = noting  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            random.Random.seed = seed  # type: ignore[method-assign]
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            known = {id(each) for each in (*self._of_numpy, *self._seeds)}
            for each in gc.get_objects():
                if type(each) in (numpy.Generator, numpy.RandomState):
                    # What both are made of, as they give it to who copies them.
                    for bits in each.__reduce__()[1]:
                        if id(bits) not in known and _is_drawn(getattr(bits, "seed_seq", None)):
                            self._of_numpy.append(bits)
                elif type(each) is numpy.SeedSequence and id(each) not in known and _is_drawn(each):
                    self._seeds.append(each)

    def begin_anew(self) -> None:
        """Let all of them begin from new entropy."""
        for found in self._of_python:
            generator = found()
            if generator is not None:
                random.Random.seed(generator, os.urandom(32))
        for bits in self._of_numpy:
            bits.state = type(bits)().state
        for seed in self._seeds:
            # As unpickling does: it has no other way to get another entropy.
            new = type(seed)(spawn_key=seed.spawn_key, pool_size=seed.pool_size)
            seed.__setstate__(new.__reduce__()[2])


def _is_drawn(seed: Any) -> bool:
    entropy = getattr(seed, "entropy", None)
    return isinstance(entropy, int) and entropy >= _DRAWN

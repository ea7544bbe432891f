"""The random streams of one trial among several in a process: put in place when its thread goes on, kept when it waits.

A trial changes hands several times in an iteration, so both must cost little. Copying Python's stream costs more than
putting it in place (8 us against 2, numpy's 27 us, in a loop over each call on one AMD EPYC core), and most loops draw
only from torch's. So Python's is copied only if its generator has moved, and numpy's is put in place by its generator.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

from ..random_streams import Streams, capture_streams

#: Python's generator of the module `random`. Its words of state, as CPython keeps them behind an object's header, are
#: an index and 624 numbers of 32 bits (Modules/_randommodule.c). They are only read, and only if they are there.
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_WORDS = ctypes.cast(id(_PYTHON) + object.__basicsize__, ctypes.POINTER(ctypes.c_uint32))


def _readable() -> bool:
    if sys.implementation.name != "cpython" or type(_PYTHON).__basicsize__ < object.__basicsize__ + 4 * 625:
        return False
    *words, index = _PYTHON.getstate()[1]
    return _WORDS[0] == index and _WORDS[1:625] == words


_READABLE = _readable()


def _python_mark() -> Any:
    """Differs after a draw: a draw moves the index, or after 624 words makes new ones. None: nothing is known."""
    return (_WORDS[0], _WORDS[1], _WORDS[624], _PYTHON.gauss_next) if _READABLE else None


class OwnStreams:
    """The streams of Python, numpy, torch and the current GPU of one trial."""

    def __init__(self, streams: Streams) -> None:
        self._python: Any = streams["python"]
        self._python_mark: Any = None
        #: torch's generator on the CPU. What draws for this trial elsewhere (dropout's masks) changes it, too.
        self.torch: torch.Tensor = streams.get("torch", torch.get_rng_state())
        self._cuda: torch.Tensor | None = streams.get("cuda")
        self._numpy: Any = streams.get("numpy")
        self._bits: Any = None

    @classmethod
    def of_process(cls) -> OwnStreams:
        return cls(capture_streams())

    def put(self) -> None:
        """Let the process' streams be these."""
        random.setstate(self._python)
        self._python_mark = _python_mark()
        self._put_numpy()
        torch.default_generator.set_state(self.torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)

    def take(self) -> None:
        """Keep the process' streams as these."""
        if self._python_mark is None or self._python_mark != _python_mark():
            self._python = random.getstate()
        self._take_numpy()
        self.torch = torch.default_generator.get_state()
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state()

    def _put_numpy(self) -> None:
        if self._numpy is None:
            return
        numpy_random = sys.modules["numpy"].random

        if self._bits is None:  # a generator of its own, so that putting it in place copies nothing
            self._bits = type(numpy_random.get_bit_generator())()
            numpy_random.set_bit_generator(self._bits)
            numpy_random.set_state(self._numpy)
        else:
            numpy_random.set_bit_generator(self._bits)
            if self._numpy[3]:  # a second normal number that is kept; a change of generators drops it
                numpy_random.set_state(self._numpy)

    def _take_numpy(self) -> None:
        if "numpy" not in sys.modules:
            return
        numpy_random = sys.modules["numpy"].random
        # Always copied: a normal number that numpy keeps for later cannot be seen in its generator, and a loop that
        # seeds may come back to the very state in which the generator was put.
        self._bits, self._numpy = numpy_random.get_bit_generator(), numpy_random.get_state()


def _words(bits: Any) -> Any:
    """The state of numpy's MT19937, 624 words and a place among them (its ``ctypes`` interface); None: of another."""
    if type(bits).__name__ != "MT19937":
        return None
    return ctypes.cast(bits.ctypes.state_address, ctypes.POINTER(ctypes.c_uint32))


def _bits_mark(bits: Any) -> Any:
    """Differs after a draw: a draw moves the place, or after 624 words makes new ones."""
    words = _words(bits)
    return object() if words is None else (words[0], words[623], words[624])


def mark_of_process() -> tuple[Any, ...]:
    """Equal to an earlier one if nothing has drawn from the process' streams since, on the CPU."""
    numpy = sys.modules.get("numpy")
    return (
        _python_mark() or random.getstate(),
        None if numpy is None else _bits_mark(numpy.random.get_bit_generator()),
        torch.default_generator.get_state().numpy().tobytes(),
    )

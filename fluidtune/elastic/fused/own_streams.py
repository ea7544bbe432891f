"""The random streams of one trial among several in a process: put in place when its thread goes on, kept when it waits.

A trial changes hands several times in an iteration, so both must cost little. Copying numpy's stream costs 36 us and
Python's 9, on one AMD EPYC core; putting them in place 0.2 us (numpy's, by its generator) and 2.5 (``timeit`` of
``get_state``, ``getstate``, ``set_bit_generator`` and ``setstate``). Most loops draw from torch's alone, which costs
less than 1 us. So Python's and numpy's are copied only if something was drawn from them.
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


def _kept_normal(legacy: Any) -> tuple[Any, Any] | None:
    """Where numpy's `RandomState` has the normal number that it keeps for the next draw, and whether it has one.

    They stand behind each other (``aug_bitgen_t`` in numpy/random/src/legacy/distributions.h: a pointer, an int, a
    double). They are looked for in an object whose number is known, and only read. None: they are not there.
    """
    numpy = sys.modules["numpy"]
    probe = numpy.random.RandomState(numpy.random.MT19937(1))
    size = type(probe).__basicsize__

    def flag_at(place: int, of: Any) -> Any:
        return ctypes.c_int.from_address(id(of) + place - 8)

    def number_at(place: int, of: Any) -> Any:
        return ctypes.c_double.from_address(id(of) + place)

    if sys.implementation.name != "cpython" or type(legacy).__basicsize__ != size:
        return None
    places = range(object.__basicsize__ + 8, size - 7, 8)
    for _ in range(4):  # with a number, without one, and again
        probe.standard_normal()
        has, number = probe.get_state()[3:]
        places = [  # type: ignore[assignment]
            place for place in places if flag_at(place, probe).value == has and number_at(place, probe).value == number
        ]
    return (flag_at(places[0], legacy), number_at(places[0], legacy)) if len(places) == 1 else None


class _Numpy:
    """What is known of numpy's own stream, from the first time on that it is there."""

    def __init__(self) -> None:
        self.random = sys.modules["numpy"].random
        self._kept = _kept_normal(self.random.rand.__self__)
        self._bits: Any = None
        self._words: Any = None

    def mark(self) -> Any:
        """Differs after a draw: it moves the place, or makes new words, or uses a kept number. None: not known."""
        bits = self.random.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._words = bits, _words(bits)
        if self._kept is None or self._words is None:
            return None
        words, (flag, number) = self._words, self._kept
        return bits, words[0], words[1], words[623], words[624], flag.value, number.value


_numpy_known: _Numpy | None = None


def _numpy() -> _Numpy | None:
    """None: numpy is not imported."""
    global _numpy_known
    if _numpy_known is None and "numpy" in sys.modules:
        _numpy_known = _Numpy()
    return _numpy_known


def gpu_generator() -> torch.Generator | None:
    """The generator of the current GPU; None: CUDA has not started in this process."""
    return torch.cuda.default_generators[torch.cuda.current_device()] if torch.cuda.is_initialized() else None


def torch_streams() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of torch's generator on the CPU, and of that of the current GPU if there is one."""
    generator = gpu_generator()
    return torch.default_generator.get_state(), None if generator is None else generator.get_state()


def put_torch_streams(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Let torch's generators go on from here, as `torch_streams` gave it."""
    torch.default_generator.set_state(states[0])
    if states[1] is not None:
        generator = gpu_generator()
        if generator is None:
            torch.cuda.set_rng_state(states[1])  # when CUDA starts
        else:
            generator.set_state(states[1])


class OwnStreams:
    """The streams of Python, numpy, torch and the current GPU of one trial."""

    def __init__(self, streams: Streams) -> None:
        self._python: Any = streams["python"]
        self._python_mark: Any = None
        #: torch's generator on the CPU. What draws for this trial elsewhere (dropout's masks) changes it, too.
        self.torch: torch.Tensor = streams.get("torch", torch.get_rng_state())
        #: That on the current GPU; None: CUDA had not started.
        self.gpu: torch.Tensor | None = streams.get("cuda")
        self._numpy: Any = streams.get("numpy")
        self._numpy_mark: Any = None
        self._bits: Any = None

    @classmethod
    def of_process(cls) -> OwnStreams:
        return cls(capture_streams())

    def put(self) -> None:
        """Let the process' streams be these."""
        random.setstate(self._python)
        self._python_mark = _python_mark()
        self._put_numpy()
        put_torch_streams((self.torch, self.gpu))
        generator = gpu_generator() if self.gpu is None else None
        if generator is not None:
            generator.seed()  # another trial has started CUDA: this one's stream begins as in a process of its own

    def take(self) -> None:
        """Keep the process' streams as these."""
        if self._python_mark is None or self._python_mark != _python_mark():
            self._python = random.getstate()
        self._take_numpy()
        self.torch, gpu = torch_streams()
        self.gpu = self.gpu if gpu is None else gpu

    def _put_numpy(self) -> None:
        known = _numpy()
        if self._numpy is None or known is None:
            return
        numpy_random = known.random
        if self._bits is None:  # a generator of its own, so that putting it in place copies nothing
            self._bits = type(numpy_random.get_bit_generator())()
            numpy_random.set_bit_generator(self._bits)
            numpy_random.set_state(self._numpy)
        else:
            numpy_random.set_bit_generator(self._bits)
            if self._numpy[3]:  # a second normal number that is kept; a change of generators drops it
                numpy_random.set_state(self._numpy)
        self._numpy_mark = known.mark()

    def _take_numpy(self) -> None:
        known = _numpy()
        if known is None:
            return
        mark = known.mark()
        if mark is None or mark != self._numpy_mark:
            self._bits, self._numpy = known.random.get_bit_generator(), known.random.get_state()


def _words(bits: Any) -> Any:
    """The state of numpy's MT19937, 624 words and a place among them (its ``ctypes`` interface); None: of another."""
    if type(bits).__name__ != "MT19937":
        return None
    return ctypes.cast(bits.ctypes.state_address, ctypes.POINTER(ctypes.c_uint32))


def mark_of_process() -> tuple[Any, ...]:
    """Equal to an earlier one if nothing has drawn from the process' streams since."""
    known, generator = _numpy(), gpu_generator()
    return (
        _python_mark() or random.getstate(),
        None if known is None else known.mark() or object(),
        torch.default_generator.get_state().numpy().tobytes(),
        None if generator is None else generator.get_state().numpy().tobytes(),
    )

"""Processes that start and end sooner: Python looks less often for garbage among the modules that it imports.

Importing torch, pandas and Ray makes a million objects that stay. The collector's default is to go through them
again and again while they are made, and once more when the interpreter ends: a second and more of each process.
"""

from __future__ import annotations

import atexit
import gc

#: Thresholds while modules are imported. Collecting goes on, so that a script's own garbage stays bounded.
_IMPORTING = (100_000, 50, 1000)
_usual: tuple[int, int, int] | None = None


def importing() -> None:
    """From now on mostly modules are imported."""
    global _usual
    if _usual is None:
        _usual = gc.get_threshold()
        gc.set_threshold(*_IMPORTING)


def imported() -> None:
    """What is there now stays for good; collect as usual from now on. Does nothing without `importing` before it."""
    global _usual
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
        _usual = None


def end_quickly() -> None:
    """At the end of this process its memory is given back as a whole, not object by object."""
    atexit.register(gc.freeze)

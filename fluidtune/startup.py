"""Makes processes start and end sooner: less garbage collection while modules are imported, and none at exit.

Importing torch, pandas and Ray makes about a million objects that stay. By default Python's collector visits them
again and again during the imports, and once more when the interpreter ends. That costs each process a second or more.
"""

from __future__ import annotations

import atexit
import gc

#: The collector's thresholds (`gc.set_threshold`) while modules are imported. About a hundred times
#: fewer collections than by default take little time, and still bound a script's own garbage.
_IMPORTING = (100_000, 50, 1000)
#: The thresholds to restore; None while they are in force.
_usual: tuple[int, int, int] | None = None


def importing() -> None:
    """Collect seldom from now on: mostly modules will be imported. Ended by `imported`."""
    global _usual
    if _usual is None:
        _usual = gc.get_threshold()
        gc.set_threshold(*_IMPORTING)


def imported() -> None:
    """Collect as usual from now on, and never look at the present objects again. Does nothing without `importing`."""
    global _usual
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
        _usual = None


def end_quickly() -> None:
    """Let this process end without a last garbage collection; the operating system takes its memory back."""
    atexit.register(gc.freeze)

"""Shows the devices of a job as a live picture where the driver is a notebook's kernel, and nothing anywhere else.

A picture is for people. What fails with it is a line in the driver's log, and the job goes on without it.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from fluidtune.report.device_strip import LOOKS, Look, strip

logger = logging.getLogger(__name__)


class NotebookPicture:
    """One picture below the cell, which changes in its place."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=LOOKS)
        #: IPython's handle of the picture; None: it is not there yet.
        self._handle: Any = None
        self._failed = False

    def show(self, line: str, devices: Iterable[int], held: Mapping[str, Iterable[int]]) -> None:
        """Add a look. ``held``: by trial, its devices."""
        if self._failed:
            return
        try:
            self._show(line, devices, held)
        except Exception as error:  # of whatever displays it
            self._failed = True
            logger.warning("FluidTune: there is no further picture of the devices: %r", error)

    def _show(self, line: str, devices: Iterable[int], held: Mapping[str, Iterable[int]]) -> None:
        from IPython.display import HTML, display

        look: dict[int, list[str]] = {}
        for trial, its in held.items():
            for device in its:
                look.setdefault(device, []).append(trial)
        self._looks.append(look)
        picture = HTML(strip(list(self._looks), sorted(devices), line))
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)


def picture_here() -> NotebookPicture | None:
    """The picture of a new job, or None where no notebook shows what this process displays.

    IPython in a terminal has no kernel. Where IPython is not imported, nobody runs a notebook.
    """
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)  # a package of that name may be another one
    shell = ask() if ask is not None else None
    return NotebookPicture() if getattr(shell, "kernel", None) is not None else None

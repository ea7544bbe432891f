"""An exception of a script that `fluidtune run` runs is shown as under ``python SCRIPT``: from the script's line on.

Otherwise its traceback begins with a dozen frames of the command, click, the launcher and runpy.
"""

from __future__ import annotations

import sys
from types import TracebackType


def show_from_the_script_on() -> None:
    """From now on this process prints the traceback of an uncaught exception in that way."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        frames = below_the_launcher(frames)
        show(kind, error.with_traceback(frames), frames)

    sys.excepthook = hook


def below_the_launcher(frames: TracebackType | None) -> TracebackType | None:
    """The frames of the script and of what it calls; all, if no script was run. None: the script was not begun."""
    at = frames
    while at is not None and not _is_of(at, "fluidtune.tune.launcher", "run_script"):
        at = at.tb_next
    if at is None:
        return frames
    at = at.tb_next
    while at is not None and _is_of(at, "runpy"):
        at = at.tb_next
    return at


def _is_of(frame: TracebackType, module: str, function: str | None = None) -> bool:
    code = frame.tb_frame.f_code
    return frame.tb_frame.f_globals.get("__name__") == module and function in (None, code.co_name)

"""What the package's own processes (a lane service, the guard of an MPS daemon) need to be started."""

from __future__ import annotations

import os
import sys


def own_environment() -> dict[str, str]:
    """The environment of a process that must import what this one can: this package, and a user's own policy."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

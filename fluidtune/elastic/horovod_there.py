"""Whether Horovod is installed, and how to install it. It looks at files only: importing Horovod would load torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

#: The libraries that can carry tensors between a trial's processes.
BACKENDS = ("torch", "horovod")
INSTALL_HINT = "type `make horovod` in FluidTune's source tree (docs/horovod.md says what it does)"


def horovod_missing() -> str | None:
    """None when Horovod with its PyTorch part is installed, else what is missing."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return "Horovod is not installed"
    if not any(list(Path(place, "torch").glob("mpi_lib_v2*.so")) for place in spec.submodule_search_locations):
        return f"the Horovod in {spec.submodule_search_locations[0]} was built without PyTorch"
    return None

"""A run's trainable and search space, kept beside its scheduler, so that `fluidtune continue` needs no script.

Tune itself keeps the trainable's name, and of the search space what is a number, a text or a domain of these.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import sys
from typing import Any

import pyarrow.fs
import ray
from ray import cloudpickle

from fluidtune.error_lines import failure
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.run_state import content_of

logger = logging.getLogger(__name__)

#: What has more bytes is not kept. Judgement: a script's function has some kilobytes, unless it holds data.
MOST_BYTES = 64 * 2**20


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ray.ObjectRef) or type(obj).__name__ == "_ParameterRegistry":
            raise FluidTuneError("it has objects of a Ray cluster, as by tune.with_parameters")
        return super().reducer_override(obj)


def kept(trainable: Any, param_space: Any) -> tuple[str, bytes, str]:
    """The path of this script, what it searches, and why that cannot be kept."""
    script, file = os.path.realpath(sys.argv[0]), io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump((trainable, param_space))
    except Exception as error:  # an attribute of the script's may raise anything
        return script, b"", str(error) if isinstance(error, FluidTuneError) else failure(error)
    return (script, file.getvalue(), "") if file.tell() <= MOST_BYTES else (script, b"", f"it has {file.tell()} bytes")


def kept_in(where: str, files: pyarrow.fs.FileSystem | None) -> tuple[str, Any, Any]:
    """The script of the run in this directory, its trainable and its search space.

    From now on modules are also looked for where the script is.

    Raises:
        FluidTuneError: they were not kept, or this process cannot read them.
    """
    try:
        state = pickle.loads(content_of(where, files, "tuner.pkl"))
        script, content, why = getattr(state["_tune_config"].scheduler, "kept", None) or ("", b"", "no fluidtune.Tuner")
        sys.path.append(os.path.dirname(script))
        state_file = os.path.join(where, "tuner.pkl")
        here = os.path.isfile(script) and os.path.isfile(state_file)
        if here and os.path.getmtime(script) > os.path.getmtime(state_file):
            logger.warning("FluidTune: %s has changed since the run began; its trainable of then is used", script)
        if content:
            return script, *pickle.loads(content)
    except Exception as error:  # bytes of another Python may raise anything
        why = failure(error)
    raise FluidTuneError(
        f"the trainable of {where} was not kept, or cannot be read here ({why}); in the run's script, give it: "
        "fluidtune.Tuner.extend(path, trainable, ...)"
    )

"""The models of a service of several: read from the TOML of `fluidtune serve plan`, or given as tables, and checked.

All that can be seen to be wrong without loading a model is said in one line. All times are seconds, all rates requests
per second, all memory is bytes unless GiB is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray import cloudpickle
from ray.tune import Checkpoint

from fluidtune.errors import FluidTuneError
from fluidtune.serving.answers import is_taken
from fluidtune.serving.model_tables import Models, ModelTable, model_tables
from fluidtune.serving.setting import PlacedModel
from fluidtune.serving.winners import Winner, mark_of, winner_named, winners
from symphony_serve.placement.stages import GIB

#: Names are parts of paths, which clients shorten at "." and ".."; "@" is between a trial and its version.
NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)


def placed_models(
    given: Models, loader: Callable[[str], Callable[..., Any]], memory: float
) -> tuple[list[PlacedModel], list[Winner], str]:
    """The models, what a process loads of each, and the directory beside which the service keeps its log.

    given: the path of a TOML file, or tables with its keys, whose ``load`` may be a function. loader: finds the
    function that a text names. memory: bytes of a device. Raises FluidTuneError.
    """
    tables = model_tables(given)
    models = [_model(table, memory) for table in tables]
    return models, [_winner(table, loader) for table in tables], str(tables[0].directory.resolve())


def _model(table: ModelTable, memory: float) -> PlacedModel:
    name, where = table.name, table.where
    if not NAME.fullmatch(name) or is_taken(name):
        said = "use letters, digits, '_' and '-', and '.' behind the first one"
        raise FluidTuneError(f"{where} cannot be asked at a path of this name; {said}")
    if "load" not in table:
        raise FluidTuneError(f'{where} has no `load`; give load = "module:function"')
    if ("run" in table) == ("checkpoint" in table):
        said = "both `run` and `checkpoint`" if "run" in table else "neither `run` nor `checkpoint`"
        raise FluidTuneError(f"{where} has {said}; give one of them")
    rate, cv = table.rate()
    size = table.number("bytes", least=0.0) if "bytes" in table else None
    if size is not None and size > memory:
        said = f"{size / GIB:.3g} GiB and a device {memory / GIB:.3g} GiB, so it fits none"
        raise FluidTuneError(f"{where} has {said}; give larger devices")
    return PlacedModel(name, table.number("slo"), rate, cv, table.number("weight", 1.0), size)


def _winner(table: ModelTable, loader: Callable[[str], Callable[..., Any]]) -> Winner:
    name, where, load = table.name, table.where, table.table["load"]
    if "run" in table:
        run = str(table.path("run"))
        try:
            found = winner_named(run, str(table.table["trial"])) if "trial" in table else winners(run)[0]
        except FluidTuneError as error:
            raise FluidTuneError(f"{where}: {error}" + ("" if "trial" in table else "; here: give `trial`")) from None
    else:
        path = table.path("checkpoint").resolve()
        if not path.is_dir():
            raise FluidTuneError(f"{where} has the checkpoint {str(path)!r}, which is no directory")
        found = Winner(name, Checkpoint.from_directory(str(path)), {}, None)
    try:
        pickled = cloudpickle.dumps(load if callable(load) else loader(str(load)))
    except FluidTuneError as error:
        raise FluidTuneError(f"{where}: {error}") from None
    except Exception as error:
        raise FluidTuneError(f"{where}: load cannot be sent to another process ({error}); define it in a module")
    with found.checkpoint.as_directory() as directory:
        return replace(found, name=name, load=pickled, mark=mark_of(directory))

"""What `serve plan --models` reads and prints for models that share GPUs, by measured `shares`.

The plans are those of `symphony_serve.placement.gpu_shares`. All times are seconds, all rates requests per second.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fluidtune.errors import FluidTuneError
from fluidtune.report.terminal_text import cell
from fluidtune.serving.model_tables import NamedTables, known, number_of
from symphony_serve.errors import ServeError
from symphony_serve.placement.gpu_shares import MIG, Segment, SharedModel, Sharing, percents, plan_shares

if TYPE_CHECKING:
    from rich.console import RenderableType

#: The keys of a model, and of a row of `shares` (its first is `gpcs` or `percent`).
KEYS = ("name", "slo", "rate", "bytes", "shares")
SIZES = (MIG.name, "percent")
ROW = ("batch", "processes", "throughput", "latency")
ADVICE = "This plan is advice: `fluidtune serve start` neither divides GPUs nor places models by it."


def is_of_shares(tables: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the models have `shares`. Raises FluidTuneError if only some of them have."""
    found = ["shares" in table for table in tables]
    if any(found) and not all(found):
        said = f"model {found.index(True) + 1} has `shares` and model {found.index(False) + 1} has none"
        raise FluidTuneError(f"{said}; give them to all models of a file, or to none")
    return any(found)


def planned(file: NamedTables, gpus: int | None, memory: float, part: float, seconds: float) -> dict[str, Any]:
    """The plan as one object; docs/placement.md has its keys.

    gpus: None: as few as can be, for ``part`` of each rate; else the largest part of all rates up to ``part``. memory:
    bytes of a GPU; infinite: not known. seconds: of the search. Raises FluidTuneError if anything is wrong, or nothing
    was found.
    """
    for name, table in file:
        known(table, KEYS, file.where(name))
    try:
        return _by_shares(file, gpus, memory, part, seconds)
    except ServeError as error:
        raise FluidTuneError(f"{file.path}: {error}")


def _rows(file: NamedTables, name: str, given: Any, key: str) -> list[Mapping[str, Any]]:
    """``given``: a list of tables, one table, or the path of a CSV file whose first line has the keys."""
    where = f"{file.where(name)}: {key}"
    if isinstance(given, str):
        try:
            with (file.directory / given).open(newline="", encoding="utf-8-sig") as text:
                lines = csv.DictReader(text, restkey="", restval=None)
                read = [(lines.line_num, row) for row in lines]
        except OSError as error:
            raise FluidTuneError(f"{where}: {given!r} cannot be read: {error.strerror}; give a CSV file, or tables")
        except (UnicodeDecodeError, csv.Error) as error:
            raise FluidTuneError(f"{where}: {given!r} is no CSV file: {error}")
        for line, row in read:
            if "" in row or None in row.values():
                raise FluidTuneError(f"{where}: line {line} of {given!r} has not as many values as the first line")
        given = [{key: _value(value) for key, value in row.items()} for _, row in read]
    found = [given] if isinstance(given, dict) else given
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise FluidTuneError(f"{where} is {given!r}, expected tables, or the path of a CSV file with rows")
    return found


def _value(text: Any) -> Any:
    """A number of a CSV file; other text as it is, to be named in an error."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _whole(table: Mapping[str, Any], key: str, where: str, default: float | None = None) -> int:
    found = number_of(table, key, where, default)
    if found != int(found):
        raise FluidTuneError(f"{where} has `{key}` {found:g}, expected a whole number")
    return int(found)


def _by_shares(file: NamedTables, gpus: int | None, memory: float, part: float, seconds: float) -> dict[str, Any]:
    models: list[SharedModel] = []
    kinds: dict[str, str] = {}
    sizes: set[int] = set()
    for name, table in file:
        where = file.where(name)
        segments = []
        for row in _rows(file, name, table["shares"], "shares"):
            its = [size for size in SIZES if size in row]
            if len(its) != 1:
                raise FluidTuneError(f"{where} has a share with {len(its)} of `gpcs` and `percent`; give one of them")
            known(row, (its[0], *ROW), f"{where}: shares")
            kinds.setdefault(its[0], name)
            size, batch = (_whole(row, key, f"{where}: shares") for key in (its[0], "batch"))
            if its[0] == MIG.name and size not in MIG.shares:
                raise FluidTuneError(f"{where} has a share of {size} GPCs, expected {', '.join(map(str, MIG.shares))}")
            processes = _whole(row, "processes", f"{where}: shares", 1.0)
            throughput, latency = (number_of(row, key, f"{where}: shares") for key in ("throughput", "latency"))
            segments.append(Segment(size, batch, processes, throughput, latency))
            sizes.add(size)
        rate, slo = number_of(table, "rate", where), number_of(table, "slo", where)
        if "bytes" not in table and memory < math.inf:
            raise FluidTuneError(f"{where} has no `bytes`; --gpu-memory needs the bytes of a process")
        size_of = number_of(table, "bytes", where, 0.0, least=0.0)
        models.append(SharedModel(name, rate, slo, tuple(segments), size_of))
    if len(kinds) > 1:
        raise FluidTuneError(
            f"{file.path}: model {kinds[SIZES[0]]} has shares in `gpcs` and model {kinds[SIZES[1]]} in `percent`; "
            "a GPU is divided by MIG or by MPS, so plan them in two files"
        )
    sharing: Sharing = MIG if MIG.name in kinds else percents(sizes)
    plan = plan_shares(models, sharing, gpus, memory, part, seconds)
    rows: list[list[dict[str, Any]]] = [
        [
            {"model": models[one.model].name, sharing.name: one.segment.size}
            | {key: getattr(one.segment, key) for key in ROW}
            | ({"slot": one.slot} if sharing is MIG else {})
            for one in gpu
        ]
        for gpu in plan.gpus
    ]
    capacity = [
        sum(one.segment.capacity for gpu in plan.gpus for one in gpu if one.model == number)
        for number in range(len(models))
    ]
    bound = {"least_gpus": plan.bound} if gpus is None else {"most_attainment": plan.bound}
    found = [
        {
            "name": model.name,
            "slo": model.slo,
            "rate": model.rate,
            "capacity": its,
            "gpus": [number for number, gpu in enumerate(rows) if any(one["model"] == model.name for one in gpu)],
        }
        for model, its in zip(models, capacity, strict=True)
    ]
    return {
        "gpus": len(rows) if gpus is None else gpus,
        "idle_gpus": 0 if gpus is None else gpus - len(rows),
        "attainment": plan.part,
        **bound,
        "ended": plan.ended,
        "shared": rows,
        "models": found,
        "advice": ADVICE,
    }


def render(found: Mapping[str, Any]) -> RenderableType:
    """What `planned` returned, as tables for `rich`."""
    from rich.console import Group
    from rich.table import Table

    first = found["shared"][0][0]
    size = next(key for key in SIZES if key in first)
    columns = (size, "batch", "processes", *(["slot"] if "slot" in first else []))
    gpus = Table()
    for name in ("GPU", "model", *columns):
        gpus.add_column(name, justify="left" if name == "model" else "right")
    for number, gpu in enumerate(found["shared"]):
        for at, one in enumerate(gpu):
            gpus.add_row("" if at else str(number), cell(one["model"]), *(str(one[key]) for key in columns))
    models = Table()
    for name in ("model", "SLO (s)", "requests/s", "capacity", "GPUs"):
        models.add_column(name, justify="left" if name == "model" else "right")
    for one in found["models"]:
        row = (f"{one['slo']:g}", f"{one['rate']:g}", f"{one['capacity']:.5g}", str(len(one["gpus"])))
        models.add_row(cell(one["name"]), *row)
    said = [f"GPUs: {found['gpus']}. There is capacity for {found['attainment']:.2%} of each rate."]
    said += [f"No plan for that has fewer than {found['least_gpus']} GPUs."] if "least_gpus" in found else []
    if "most_attainment" in found:
        said += [f"No plan on these GPUs has it for more than {found['most_attainment']:.2%}."]
    said += [f"GPUs that hold no model: {found['idle_gpus']}."] if found["idle_gpus"] else []
    said += [] if found["ended"] else ["The search was ended before it was through; --seconds gives it longer."]
    return Group(gpus, models, *said, found["advice"])

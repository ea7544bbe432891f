"""What `fluidtune serve plan --models` reads and prints: which models are to stand on which GPUs. It needs no Ray.

The search is `symphony_serve.placement`. A service of several models (`placed_devices`) searches with times that it has
measured, and does not cut models. All times are seconds, all rates requests per second, all memory is bytes unless GiB
is said.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fluidtune.errors import FluidTuneError
from fluidtune.report.terminal_text import cell
from fluidtune.serving.capacity import kept_profiles
from fluidtune.serving.model_tables import ModelTable, checked, model_tables, numbers_of
from symphony_serve.errors import ServeError
from symphony_serve.placement.arrivals import SAMPLE, drawn
from symphony_serve.placement.search import MOST_GPUS, LeastGpus, Search
from symphony_serve.placement.served_models import Cut, ServedModel, Shape, cuts_of_layers
from symphony_serve.placement.simulator import Requests, Simulator
from symphony_serve.placement.stages import GIB

if TYPE_CHECKING:
    from rich.console import RenderableType

#: The part of the requests that `--find` makes answered in time.
ATTAINMENT = 0.99
ADVICE = "`fluidtune serve start --models` places models by the same search, from times that it measures; it cuts none."


class ModelsFile:
    """The models of a TOML file, and their requests, which keep `busy` GPUs busy. memory: of a GPU; None: not known."""

    def __init__(self, path: str, memory: float | None):
        self._path, self._memory, self._tables = path, memory, model_tables(path)
        self.models = list(map(self._model, self._tables))
        self.requests = self._requests()

    def _model(self, table: ModelTable) -> ServedModel:
        slo, weight, where = table.number("slo"), table.number("weight", 1.0), table.where
        delay, hop = table.number("delay", 0.0, least=0.0), table.number("hop", 0.0, least=0.0)
        try:
            cuts: dict[Shape, Cut] = {}
            if "layers" in table:
                layers = table.layers
                seconds = numbers_of(layers, "seconds", f"{where}: layers")
                cuts = cuts_of_layers(seconds, self._bytes(layers, where, [0.0] * len(seconds)), hop)
            if "run" in table or "seconds" in table:
                seconds, delay = self._alone(table, delay)
                size = sum(
                    self._bytes(table.table, where, [0.0 if Shape(1, 1) not in cuts else cuts[Shape(1, 1)].bytes])
                )
                cuts[Shape(1, 1)] = Cut(tuple(seconds), size)
            if not cuts:
                raise FluidTuneError(f"{where} has no times; give `run`, `seconds` or `layers`")
            slowed = {shape: cut.slowed() for shape, cut in cuts.items()}
        except ServeError as error:
            raise FluidTuneError(f"{where}: {error}")
        return ServedModel(table.name, slowed, slo, weight, delay)

    def _bytes(self, table: Mapping[str, Any], where: str, without: list[float]) -> list[float]:
        """The bytes in ``table``, or ``without`` if it has none and they are not needed or known from the layers."""
        if "bytes" not in table:
            if self._memory is not None and not any(without):
                raise FluidTuneError(f"{where} has no `bytes`; --gpu-memory needs the bytes of its weights")
            return without
        if isinstance(table["bytes"], list):
            return numbers_of(table, "bytes", where, least=0.0)
        return [checked(table["bytes"], "bytes", where, least=0.0)]

    def _alone(self, table: ModelTable, delay: float) -> tuple[list[float], float]:
        """The seconds of a batch of 1 on one GPU, and of the delay that was measured with it."""
        if "run" not in table:
            return [table.number("seconds")], delay
        if "seconds" in table:
            raise FluidTuneError(f"{table.where} has both `run` and `seconds`; give one of them")
        profiles, delays = kept_profiles(str(table.path("run")))
        trial = table.table.get("trial", next(iter(profiles)) if len(profiles) == 1 else None)
        if trial not in profiles:
            there = ", ".join(sorted(profiles))
            raise FluidTuneError(f"{table.where} has the trial {trial!r}, expected `trial` of {there}")
        if profiles[trial].parts is not None:
            raise FluidTuneError(f"{table.where} has a `run` that was served in stages; give its `layers`")
        return [profiles[trial].seconds(1)], max(delay, delays.get(trial, 0.0))

    def _requests(self) -> Requests:
        rates, cvs = zip(*(table.rate() for table in self._tables), strict=True)
        self.busy = sum(rate * one.gpu_seconds for rate, one in zip(rates, self.models, strict=True))
        if self.busy > MOST_GPUS:
            raise FluidTuneError(
                f"{self._path}: {sum(rates):g} requests/s keep at least {self.busy:.0f} GPUs busy, and no plan is "
                f"made for more than {MOST_GPUS}; ask about smaller rates"
            )
        found = drawn(rates, cvs, SAMPLE)
        if not len(found):
            raise FluidTuneError(f"{self._path}: no request comes in {SAMPLE / sum(rates):g} s; give larger rates")
        return found

    def check(self, gpus: int) -> None:
        """Raises FluidTuneError if a model fits none of ``gpus`` GPUs, or is too slow on each."""
        for one in self.models:
            cuts = [cut for shape, cut in one.cuts.items() if shape.gpus <= gpus]
            least = min(cut.bytes for cut in cuts)
            room = math.inf if self._memory is None else self._memory
            if least > room:
                raise FluidTuneError(
                    f"model {one.name} has {least / GIB:.3g} GiB on a GPU even in its smallest stages, and a GPU has "
                    f"{room / GIB:.3g} GiB; give its `layers`, or larger GPUs"
                )
            needed = min(cut.latency for cut in cuts if cut.bytes <= room) + one.delay
            if needed > one.slo:
                raise FluidTuneError(
                    f"model {one.name} has an SLO of {one.slo:g} s, but a request takes {needed:.4g} s at the least; "
                    f"give an SLO of at least {math.ceil(1e4 * needed) / 1e4} s"
                )


def planned(
    path: str, gpus: int | None, gpu_memory: float | None, goal: float | None, budget: float
) -> tuple[dict[str, Any], RenderableType]:
    """Where the models of the file at ``path`` stand, as an object and as tables. docs/placement.md has its keys.

    gpus: None: the least number that attains ``goal``, `ATTAINMENT` if that is None. gpu_memory: GiB of weights on
    each; None: no limit. budget: seconds of the search, which Ctrl-C ends, too. Raises FluidTuneError if anything is
    wrong, or nothing was found.
    """
    goal = ATTAINMENT if goal is None else goal
    if not 0 < goal <= 1:
        raise FluidTuneError(f"--attainment is {goal:g}, expected a part above 0, up to 1")
    if gpus is not None and not 1 <= gpus <= MOST_GPUS:
        raise FluidTuneError(f"--gpus is {gpus}, expected 1 to {MOST_GPUS}")
    if not 0 <= budget < math.inf:
        raise FluidTuneError(f"--seconds is {budget:g}, expected a number of 0 or more")
    if gpu_memory is not None and not 0 < gpu_memory < math.inf:
        raise FluidTuneError(f"--gpu-memory is {gpu_memory:g}, expected GiB above 0")
    memory = None if gpu_memory is None else gpu_memory * GIB
    file = ModelsFile(path, memory)
    file.check(gpus or MOST_GPUS)
    models, requests, room = file.models, file.requests, math.inf if memory is None else memory
    search = Search(models, gpus, room, requests) if gpus else LeastGpus(models, room, requests, goal, file.busy)
    try:
        ended = _search(search, budget)
    except ServeError as error:
        raise FluidTuneError(str(error))
    found, count = search.best, search.gpus
    if not found.groups:
        more = ", or more GPUs" if gpus else f", or a smaller --attainment than {goal:g}"
        raise FluidTuneError(f"the search was ended before it found a placement; give it more --seconds{more}")
    simulator = Simulator(models, requests)
    played = simulator.play(*simulator.lane(found.groups))
    placed = sorted(found.groups, key=lambda group: (-group.shape.gpus, group))
    groups, used = [], 0
    for shape, held in placed:
        groups.append(
            {
                "configuration": str(shape),
                "gpus": list(range(used, used + shape.gpus)),
                "models": [models[one].name for one in held],
                "bytes_per_gpu": sum(models[one].cuts[shape].bytes for one in held),
            }
        )
        used += shape.gpus
    rows = []
    for number, model in enumerate(models):
        its = played.attained[requests.models == number, 0]
        latencies = played.latency[requests.models == number, 0][its]
        rows.append(
            {
                "name": model.name,
                "slo": model.slo,
                "weight": model.weight,
                "groups": [at for at, (_, held) in enumerate(placed) if number in held],
                "attainment": float(its.mean()) if len(its) else 1.0,
                "mean_seconds": float(latencies.mean()) + model.delay if len(latencies) else None,
            }
        )
    plan = {
        "gpus": count,
        "idle_gpus": count - used,
        "attainment": found.attainment,
        "ended": ended,
        "groups": groups,
        "models": rows,
        "advice": ADVICE,
    }
    return plan, render(plan, memory is not None)


def _search(search: Search | LeastGpus, budget: float) -> bool:
    """Search until the end, ``budget`` seconds have passed or Ctrl-C. Whether it was the end."""
    from rich.console import Console

    end, ended = time.monotonic() + budget, False
    with suppress(KeyboardInterrupt), Console(stderr=True).status("Searching; Ctrl-C ends it with the best so far"):
        for best in search.steps():
            if best.groups and time.monotonic() > end:
                break
        else:
            ended = True
    return ended


def render(found: Mapping[str, Any], memory_known: bool) -> RenderableType:
    """What `planned` found, as tables for `rich`."""
    from rich.console import Group
    from rich.table import Table

    title = f"{found['gpus']} GPUs: {found['attainment']:.2%} of the requests within their SLO, by simulation"
    groups = Table(title=title, title_justify="left")
    for name in ("group", "GPUs", "stages", "GPUs a stage", "GiB a GPU", "models"):
        groups.add_column(name, justify="left" if name == "models" else "right")
    for at, one in enumerate(found["groups"]):
        op, pp = one["configuration"].split("x")
        gpus = f"{one['gpus'][0]}-{one['gpus'][-1]}" if len(one["gpus"]) > 1 else str(one["gpus"][0])
        size = f"{one['bytes_per_gpu'] / GIB:.3g}" if memory_known else "?"
        groups.add_row(str(at), gpus, pp, op, size, cell(", ".join(one["models"])))
    models = Table()
    for name in ("model", "SLO (s)", "within it", "mean (s)", "groups"):
        models.add_column(name, justify="left" if name == "model" else "right")
    for one in found["models"]:
        mean = "-" if one["mean_seconds"] is None else f"{one['mean_seconds']:.3g}"
        where = ", ".join(map(str, one["groups"])) or "none"
        models.add_row(cell(one["name"]), f"{one['slo']:g}", f"{one['attainment']:.2%}", mean, where)
    lost = 1 - found["attainment"]
    said = [f"{lost:.2%} are refused." if lost else "No request is refused."]
    said += [f"GPUs that hold no model: {found['idle_gpus']}."] if found["idle_gpus"] else []
    said += [] if found["ended"] else ["The search was ended before it was through; --seconds gives it longer."]
    return Group(groups, models, *said, found["advice"])

"""What placements attain: many placements are played on the same requests at once, in lockstep.

A placement is a *lane*. Requests come in the order of their arrival. Of the groups that hold its model, one with the
least clock of its last stage gets it, the first of several. It is admitted if it makes its SLO, which is known at once:
it starts in each stage when it has left the stage before and the stage is free. Otherwise it is refused, and occupies
nothing. Source: AlpaServe, section 4.2 and its simulator (alpa-projects/mms).

With o_s the seconds from the start of a request to its stage s if nothing is in its way, stage s starts it at
``o_s + max(arrival, c_0 - o_0, ..., c_s - o_s)``, where c are the stages' clocks. So a request is one step of NumPy
for all stages of all lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from symphony_serve.placement.served_models import Group, ServedModel, Shape

#: Lanes that are played at once, and their groups times models. They bound the memory to about 300 MB: there are 13
#: bytes for each request and lane, and 9 for each model, lane and group.
MOST_LANES, MOST_CELLS = 512, 10_000_000


@dataclass(frozen=True)
class Requests:
    """Arrivals in seconds, ascending, and the number of the model of each."""

    times: np.ndarray
    models: np.ndarray

    def __len__(self) -> int:
        return len(self.times)

    def of(self, models: Sequence[int]) -> Requests:
        """Those of these models, which are numbered anew in this order."""
        number = np.full(max(self.models.max(initial=-1), *models) + 1, -1)
        number[list(models)] = np.arange(len(models))
        kept = number[self.models] >= 0
        return Requests(self.times[kept], number[self.models[kept]])


class Played(NamedTuple):
    """What became of the requests, by request and lane.

    attained: whether it was answered within its SLO. latency: its seconds, if so. group: that it was sent to, -1 if no
    group holds its model.
    """

    attained: np.ndarray
    latency: np.ndarray
    group: np.ndarray


class Simulator:
    """Plays placements of these models on these requests."""

    def __init__(self, models: Sequence[ServedModel], requests: Requests):
        self.models, self.requests = models, requests
        self.weights = np.array([one.weight for one in models])
        self.counts = np.bincount(requests.models, minlength=len(models))
        self.total = float(self.weights @ self.counts)
        self.shapes = sorted({shape for one in models for shape in one.cuts})
        deepest = max(len(cut.seconds) for one in models for cut in one.cuts.values())
        # One shape more than there are: that of the groups which a lane has not, and no model has a cut for.
        self.bytes = np.full((len(models), len(self.shapes) + 1), np.inf)
        self._starts = np.zeros((len(models), len(self.shapes) + 1, deepest))
        self._busy = np.zeros_like(self._starts)
        for number, model in enumerate(models):
            for shape, cut in model.cuts.items():
                at, stages = self.shapes.index(shape), len(cut.seconds)
                self.bytes[number, at] = cut.bytes
                self._busy[number, at, :stages] = cut.seconds
                ends = np.cumsum(cut.seconds) + cut.hop * np.arange(stages)
                # Stages that are not there take no time, and come after the last one.
                self._starts[number, at] = np.append(ends - cut.seconds, np.full(deepest - stages, ends[-1]))

    def shape_numbers(self, lanes: Sequence[Sequence[Shape]]) -> np.ndarray:
        """The shapes of the groups, by lane and group, as numbers. Lanes with fewer groups are filled up."""
        numbers = np.full((len(lanes), max(map(len, lanes))), len(self.shapes))
        for lane, shapes in enumerate(lanes):
            numbers[lane, : len(shapes)] = [self.shapes.index(shape) for shape in shapes]
        return numbers

    def play(self, shapes: np.ndarray, held: np.ndarray) -> Played:
        """``shapes``: by lane and group (`shape_numbers`). ``held``: by model, lane and group, whether it stands there.

        The three arrays of what is returned have one row for each request, and one column for each lane.
        """
        lanes = max(1, min(MOST_LANES, MOST_CELLS // max(1, shapes.shape[1] * len(self.models))))
        parts = [
            self._play(shapes[first : first + lanes], held[:, first : first + lanes])
            for first in range(0, len(shapes), lanes)
        ]
        return parts[0] if len(parts) == 1 else Played(*(np.hstack(each) for each in zip(*parts, strict=True)))

    def _play(self, shapes: np.ndarray, held: np.ndarray) -> Played:
        lanes, groups = shapes.shape
        clocks = np.zeros((lanes, groups, self._starts.shape[2]))
        flat, last, shape_of = clocks.reshape(-1, clocks.shape[2]), clocks[:, :, -1], shapes.ravel()
        elsewhere = np.where(held, 0.0, np.inf)
        somewhere: np.ndarray = np.any(held, axis=2)
        allowed = np.array([[one.slo - one.delay] for one in self.models])
        allowed = np.where(somewhere, allowed, -np.inf)
        base = np.arange(lanes) * groups
        rows = np.flatnonzero(np.take(np.any(somewhere, axis=1), self.requests.models))
        attained = np.zeros((len(self.requests), lanes), dtype=bool)
        latency = np.zeros((len(self.requests), lanes), dtype=np.float32)
        group = np.full((len(self.requests), lanes), -1, dtype=np.int32)
        key = np.empty((lanes, groups))
        times, numbers = self.requests.times[rows].tolist(), self.requests.models[rows].tolist()
        for row, time, model in zip(rows.tolist(), times, numbers, strict=True):
            np.add(last, elsewhere[model], out=key)
            chosen = key.argmin(axis=1)
            group[row] = chosen
            chosen += base
            clock = flat.take(chosen, axis=0)
            shape = shape_of.take(chosen)
            start = self._starts[model].take(shape, axis=0)
            ends = clock - start
            first = ends[:, 0]
            np.maximum(first, time, out=first)
            np.maximum.accumulate(ends, axis=1, out=ends)
            ends += start
            ends += self._busy[model].take(shape, axis=0)
            took = ends[:, -1] - time
            admitted = np.less_equal(took, allowed[model], out=attained[row])
            latency[row] = took
            flat[chosen] = np.where(admitted[:, None], ends, clock)
        group[~somewhere[self.requests.models]] = -1
        return Played(attained, latency, group)

    def lane(self, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
        """These groups as one lane, in the form that `play` wants."""
        held = np.zeros((len(self.models), 1, len(groups)), dtype=bool)
        for at, group in enumerate(groups):
            held[list(group.models), 0, at] = True
        return self.shape_numbers([[group.shape for group in groups]]), held

    def groups(self, shapes: np.ndarray, held: np.ndarray) -> tuple[Group, ...]:
        """One lane in words: ``shapes`` by group, ``held`` by model and group. Groups without a model are left out."""
        return tuple(
            Group(self.shapes[shape], tuple(np.flatnonzero(held[:, at]).tolist()))
            for at, shape in enumerate(shapes)
            if held[:, at].any()
        )

"""Nexus (SOSP 2019): a plan says which models and batch sizes each GPU has; requests are dealt out when they come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS
from symphony_serve.messages import (
    BatchDone,
    Dispatch,
    Event,
    GpuJoined,
    Instruction,
    Refuse,
    Request,
    RequestArrived,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Model

#: Seconds between plans. Source: Nexus, section 5: an epoch is 10 s or longer.
EPOCH_S = 10.0
#: Parts of the shorter cycle that are tried when two nodes are put together. Judgement: Nexus tries the whole of it
#: only; a node alone has used its whole SLO for it, so that few would ever fit together.
SQUEEZES = (1.0, 0.8, 0.6, 0.5, 0.4)


@dataclass(frozen=True)
class Session:
    """A model's place on a GPU: its batch size there, and the requests per second that it gets."""

    model: str
    size: int
    rate: float


@dataclass
class Node:
    """What one GPU does in turn. cycle: seconds after which each session has had its turn."""

    cycle: float
    sessions: list[Session] = field(default_factory=list)


class _Planned(Window):
    """Nexus' sliding window: the target is the planned batch size."""

    def set_rate(self, rate: float) -> None:
        """Does nothing: a plan says the target."""


class Nexus:
    """GPUs that know nothing of each other. Each runs the next of its models that has a request, at once.

    rates: the expected requests per second by model, for the first plan. Later plans use the rates of the last epoch.
    """

    def __init__(self, models: Iterable[Model], rates: Mapping[str, float]):
        self._models = {model.name: model for model in models}
        self._rates = dict(rates)
        self._counts = dict.fromkeys(self._models, 0)
        self._next_plan = 0.0
        self._plans: dict[int, int] = {}
        self._running: set[int] = set()
        #: By GPU: its formers by model, in the order of turns.
        self._formers: dict[int, dict[str, _Planned]] = {}
        #: By model: GPU -> share, and GPU -> credit. The GPU with the largest credit gets the next request.
        self._shares: dict[str, dict[int, float]] = {}
        self._credits: dict[str, dict[int, float]] = {}

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened at ``now``."""
        if isinstance(event, GpuJoined):
            self._plans[event.gpu] = 0
            self._next_plan = now
            return [WakeAt(now)]
        if isinstance(event, RequestArrived):
            self._counts[event.request.model] += 1
            gpu = self._deal(event.request) if self._formers else None
            return [WakeAt(now)] if gpu not in self._running else []
        if isinstance(event, BatchDone):
            self._running.discard(event.gpu)
            out: list[Instruction] = []
            self._run(event.gpu, now, out)
            return out
        assert isinstance(event, Tick), event
        return self._tick(now)

    def _tick(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if now >= self._next_plan:
            if self._formers and sum(self._counts.values()):
                self._rates = {name: count / EPOCH_S for name, count in self._counts.items()}
            self._counts = dict.fromkeys(self._models, 0)
            self._next_plan = now + EPOCH_S
            self._plan_anew()
        for gpu in self._plans:
            self._run(gpu, now, out)
        out.append(WakeAt(self._next_plan))
        return out

    def _plan_anew(self) -> None:
        waiting = [one for formers in self._formers.values() for former in formers.values() for one in former.waiting()]
        nodes = plan(self._models, self._rates, len(self._plans))
        self._formers = {gpu: {} for gpu in self._plans}
        self._shares = {name: {} for name in self._models}
        for gpu, node in zip(self._plans, nodes, strict=False):
            for session in node.sessions:
                model = self._models[session.model]
                former = self._formers[gpu][session.model] = _Planned(model.profile, model.slo, NO_DELAYS)
                former.target = session.size
                self._shares[session.model][gpu] = session.rate
        self._credits = {name: dict.fromkeys(shares, 0.0) for name, shares in self._shares.items()}
        for request in waiting:
            self._deal(request)

    def _deal(self, request: Request) -> int:
        """Give the request to a GPU of its model, round robin by planned rate."""
        shares, credits = self._shares[request.model], self._credits[request.model]
        for gpu, share in shares.items():
            credits[gpu] += share
        chosen = max(shares, key=credits.__getitem__)
        credits[chosen] -= sum(shares.values())
        self._formers[chosen][request.model].add(request)
        return chosen

    def _run(self, gpu: int, now: float, out: list[Instruction]) -> None:
        if gpu in self._running:
            return
        formers = self._formers.get(gpu, {})
        for name in list(formers):
            former = formers.pop(name)
            formers[name] = former  # Its next turn is after all others.
            candidate = former.form(now) if len(former) else None
            out.extend(Refuse(one.request, one.reason) for one in former.refused())
            if candidate is not None:
                requests = former.take()
                out.append(Dispatch(gpu, 1, self._plans[gpu], name, requests, now, candidate.seconds))
                self._plans[gpu] += 1
                self._running.add(gpu)
                return


def plan(models: Mapping[str, Model], rates: Mapping[str, float], gpus: int) -> list[Node]:
    """The plan that uses ``gpus`` GPUs as well as possible: for the largest multiple of the rates that fits on them."""
    load = {name: max(rates.get(name, 0.0), 1e-3) for name in models}
    low, high = 0.0, 1.0
    while len(_nodes(models, load, high)) <= gpus:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        if len(_nodes(models, load, middle)) <= gpus:
            low = middle
        else:
            high = middle
    nodes = _nodes(models, load, low)
    return nodes if low else _crowded(models, load, gpus)


def _crowded(models: Mapping[str, Model], load: Mapping[str, float], gpus: int) -> list[Node]:
    """A plan for fewer GPUs than even the smallest load needs: models go to GPUs in turn, with batches of 1."""
    nodes = [Node(math.inf) for _ in range(gpus)]
    for place, (name, rate) in enumerate(load.items()):
        nodes[place % gpus].sessions.append(Session(name, 1, rate))
    return nodes


def _nodes(models: Mapping[str, Model], rates: Mapping[str, float], factor: float) -> list[Node]:
    """Squishy bin packing (section 6.1 of Nexus) for ``factor`` times the rates."""
    full: list[Node] = []
    parts: list[Node] = []
    for name, model in models.items():
        rate, profile = rates[name] * factor, model.profile
        size = max(1, profile.largest(model.slo / 2))
        capacity = size / profile.seconds(size)
        whole = int(rate / capacity)
        full += [Node(profile.seconds(size), [Session(name, size, capacity)]) for _ in range(whole)]
        left = rate - whole * capacity
        if left > 1e-9:
            parts.append(_residual(model, left, size))
    merged: list[Node] = []
    for node in sorted(parts, key=lambda one: -_occupancy(models, one)):
        fits = [joined for joined in _joins(models, merged, node)]
        if fits:
            place, best = max(fits, key=lambda one: _occupancy(models, one[1]))
            merged[place] = best
        else:
            merged.append(node)
    return full + merged


def _residual(model: Model, rate: float, most: int) -> Node:
    """A node for a rate that does not fill a GPU: the largest batch that can be gathered and run within the SLO."""
    for size in range(most, 0, -1):
        if (size - 1) / rate + model.profile.seconds(size) <= model.slo:
            return Node(max(size / rate, model.profile.seconds(size)), [Session(model.name, size, rate)])
    return Node(model.profile.seconds(1), [Session(model.name, 1, rate)])


def _occupancy(models: Mapping[str, Model], node: Node) -> float:
    return sum(models[one.model].profile.seconds(one.size) for one in node.sessions) / node.cycle


def _joins(models: Mapping[str, Model], nodes: list[Node], node: Node) -> Iterator[tuple[int, Node]]:
    """Places of the nodes that can take ``node`` in, and what becomes of them."""
    for place, other in enumerate(nodes):
        for squeeze in SQUEEZES:
            cycle = squeeze * min(node.cycle, other.cycle)
            sessions = [
                Session(one.model, max(1, math.ceil(one.rate * cycle - 1e-9)), one.rate)
                for one in (*other.sessions, *node.sessions)
            ]
            seconds = [models[one.model].profile.seconds(one.size) for one in sessions]
            in_time = all(cycle + time <= models[one.model].slo for one, time in zip(sessions, seconds, strict=True))
            if in_time and sum(seconds) <= cycle:
                yield place, Node(cycle, sessions)
                break

"""The scheduler of one sub-cluster: all its models and GPUs. Events go in, instructions come out.

It carries messages between the models (`model_side`) and the GPUs (`matching`) and decides nothing else. What a moment
brings is decided when `Tick` comes: so all requests and answers of a moment are known before a batch is closed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from symphony_serve.errors import ServeError
from symphony_serve.gpu_table import GpuTable
from symphony_serve.matching import Expired, Matching, Offer
from symphony_serve.messages import (
    BatchDone,
    BatchPassed,
    BatchTook,
    Cancelled,
    Dispatch,
    Event,
    GpuHolds,
    GpuJoined,
    GpuLeaving,
    GpuLost,
    Instruction,
    ModelAdded,
    ModelGone,
    ModelRemoved,
    Reason,
    Refuse,
    RequestArrived,
    StoodStill,
    Suspect,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Batching, Model, ModelSide
from symphony_serve.profiles import Profile


class Scheduler:
    """Decides for requests to ``models`` which batches run on which GPUs, and when.

    least_patience: seconds from the start of a batch before which its GPU is not suspect, however short the batch is;
    more than 0 on real machines, where any process may stand still for a while. Raises ServeError if two models have
    one name.
    """

    def __init__(self, models: Iterable[Model], least_patience: float = 0.0):
        given = list(models)
        if not given or len({model.name for model in given}) < len(given):
            names = ", ".join(model.name for model in given)
            raise ServeError(f"the models are named {names or 'not at all'}, expected one name or more, each once")
        self._sides = {model.name: ModelSide(model) for model in given}
        #: The names of the models that were removed and still have requests.
        self._leaving: set[str] = set()
        self._gpus = GpuTable(max(model.profile.depth for model in given) - 1, least_patience)
        self._matching = Matching(self._sides, self._gpus)
        #: By id of each request that is neither answered nor refused, why it is refused if its GPU is lost; None: it is
        #: not, but waits for another one.
        self._open: dict[int, Reason | None] = {}
        self._now = -math.inf
        #: The moment of the latest WakeAt.
        self._wake = math.inf
        self._handlers = {
            RequestArrived: self._request_arrived,
            Cancelled: self._cancelled,
            ModelAdded: self._model_added,
            ModelRemoved: self._model_removed,
            GpuHolds: self._gpu_holds,
            GpuJoined: self._gpu_joined,
            GpuLeaving: self._gpu_leaving,
            GpuLost: self._gpu_lost,
            BatchDone: self._batch_done,
            BatchPassed: self._batch_passed,
            BatchTook: self._batch_took,
            StoodStill: self._stood_still,
            Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened at ``now``. A clock that goes back stands still here until it is right again.

        Raises ServeError for a request whose deadline is none, and for a model that is added though one of its name is
        there. Nothing has happened then.
        """
        if now > self._now:
            self._now = now
        else:
            now = self._now
        out: list[Instruction] = []
        self._handlers[type(event)](event, now, out)  # type: ignore[operator]
        for name in [one for one in self._leaving if self._is_idle(one)]:
            self._leaving.remove(name)
            del self._sides[name]
            self._matching.remove(name)
            out.append(ModelGone(name))
        wake = min(self._matching.next_wake(now), self._gpus.watch_at())
        if wake != self._wake:
            self._wake = wake
            if wake < math.inf:
                out.append(WakeAt(max(wake, now)))
        return out

    def _request_arrived(self, event: RequestArrived, now: float, out: list[Instruction]) -> None:
        request = event.request
        side = self._sides.get(request.model)
        if side is None or request.model in self._leaving:
            out.append(Refuse(request, Reason.UNKNOWN_MODEL))
            return
        side.add(request, now)  # First: it raises ServeError for a request that cannot be.
        self._open[request.id] = None
        self._offer(side, side.offer(now), now, out, frozenset((request.id,)), Reason.LATE_ON_ARRIVAL)

    def _cancelled(self, event: Cancelled, now: float, out: list[Instruction]) -> None:
        side = self._sides.get(event.model)
        request = side.former.remove(event.request) if side is not None else None
        if side is not None and request is not None:
            self._refuse(Refuse(request, Reason.CANCELLED), out)
            self._offer(side, side.offer(now), now, out)
        elif event.request in self._open:
            self._open[event.request] = Reason.CANCELLED

    def _model_added(self, event: ModelAdded, now: float, out: list[Instruction]) -> None:
        model = event.model
        if model.name in self._sides:
            raise ServeError(f"model {model.name} is served already, expected another name")
        self._sides[model.name] = ModelSide(model)
        self._matching.add(model.name)

    def _model_removed(self, event: ModelRemoved, now: float, out: list[Instruction]) -> None:
        if event.model in self._sides:
            self._leaving.add(event.model)

    def _is_idle(self, name: str) -> bool:
        """Whether no request of the model waits, and none was sent that is not answered."""
        sent = (batch.model for gpu in self._gpus.gpus.values() for batch in gpu.sent)
        return not len(self._sides[name].former) and name not in sent

    def _gpu_joined(self, event: GpuJoined, now: float, out: list[Instruction]) -> None:
        self._gpus.join(event.gpu, event.token, now, event.models)
        self._matching.spread()

    def _gpu_holds(self, event: GpuHolds, now: float, out: list[Instruction]) -> None:
        gpu = self._gpus.gpus.get(event.gpu)
        if gpu is not None:
            self._gpus.hold(gpu, event.models)
            self._matching.spread()

    def _gpu_leaving(self, event: GpuLeaving, now: float, out: list[Instruction]) -> None:
        gpu = self._gpus.gpus.get(event.gpu)
        if gpu is not None:
            self._gpus.close(gpu)

    def _gpu_lost(self, event: GpuLost, now: float, out: list[Instruction]) -> None:
        """What the GPU has not answered waits again, or is refused: what has lost two GPUs may be what ends them."""
        sent = self._gpus.drop(event.gpu)
        self._matching.spread()
        for batch in sent:
            side = self._sides[batch.model]
            began = event.begun is None or batch.plan in event.begun
            for request in batch.requests:
                reason = self._open[request.id]
                if reason is Reason.CANCELLED or (began and reason is not None):
                    self._refuse(Refuse(request, reason), out)
                else:
                    self._open[request.id] = Reason.LOST_TWICE if began else reason
                    side.former.add(request)
            back = frozenset(request.id for request in batch.requests)
            self._offer(side, side.offer(now), now, out, back, Reason.GPU_LOST)

    def _batch_done(self, event: BatchDone, now: float, out: list[Instruction]) -> None:
        over = self._gpus.answer(event.gpu, event.token, event.plan, now)
        for request in over.requests if over is not None else ():
            del self._open[request.id]

    def _batch_passed(self, event: BatchPassed, now: float, out: list[Instruction]) -> None:
        self._gpus.passed(event.gpu, event.token, event.plan, now)

    def _batch_took(self, event: BatchTook, now: float, out: list[Instruction]) -> None:
        side = self._sides.get(event.model)
        if side is not None and event.requests and side.took(event.requests, event.seconds, event.waited):
            self._offer(side, side.offer(now), now, out)

    def _stood_still(self, event: StoodStill, now: float, out: list[Instruction]) -> None:
        self._gpus.wait_longer(event.seconds)

    def _tick(self, event: Tick, now: float, out: list[Instruction]) -> None:
        self._wake = math.inf  # A tick that came a little too early uses its WakeAt up as well: ask for it again.
        for gpu in self._gpus.suspects(now):
            self._gpus.close(gpu)
            out.append(Suspect(gpu.id, gpu.token))
        while (due := self._matching.next(now)) is not None:
            side = self._sides[due.model]
            if isinstance(due, Expired):
                self._offer(side, side.offer_anew(now), now, out)
            else:
                gpu = due.gpu
                batch = side.take(now, gpu)
                if batch is not None:
                    dispatch = Dispatch(gpu.id, gpu.token, gpu.plans, due.model, *batch)
                    self._gpus.send(gpu, dispatch)
                    out.append(dispatch)
                self._offer(side, side.offer(now), now, out)

    def _offer(
        self,
        side: ModelSide,
        offer: Offer | None,
        now: float,
        out: list[Instruction],
        named: frozenset[int] = frozenset(),
        reason: Reason = Reason.LATE,
    ) -> None:
        """Hand a model's new offer on. Refuse what it has given up; late requests that are ``named`` for ``reason``."""
        self._matching.offer(side.model.name, offer, now)
        for refuse in side.former.refused():
            instead = refuse.reason is Reason.LATE and refuse.request.id in named
            self._refuse(Refuse(refuse.request, reason) if instead else refuse, out)

    def _refuse(self, refuse: Refuse, out: list[Instruction]) -> None:
        self._open.pop(refuse.request.id, None)
        out.append(refuse)

    def batching(self, model: str) -> Batching:
        """The former that the model has now: `Batching.WINDOW` or `Batching.ORLOJ`."""
        return self._sides[model].batching

    def profile(self, model: str) -> Profile:
        """The seconds of the model's batches as they are known now; where times vary, the expected ones."""
        return self._sides[model].profile

    def alone(self, model: str) -> float:
        """The fewest seconds of a batch of 1."""
        return self._sides[model].fastest[1]

    def least_latency(self, model: str, gpus: int, now: float, count: int = 1) -> float:
        """Seconds at the least until so many GPUs have run ``count`` more requests to the model, and all before them.

        Infinite: there are none. What waits for other models need not go first, batches may be the fastest ones, and
        GPUs that are not there may come back at once: so it can only be more. To refuse at once what has less time
        costs the least: its input need not be read. (Of several GPUs, one may be through with a request while
        another one still runs what came before it. So a request may be refused that would have been just in time.)
        """
        if not gpus:
            return math.inf
        side = self._sides[model]
        each, alone = side.fastest
        there = self._gpus.gpus.values()
        with_it = [one for one in there if not one.leaves and (one.models is None or model in one.models)]
        busy = sum([max(0.0, one.free - now) for one in with_it])
        return (busy + (len(side.former) + count - 1) * each + min(each, alone)) / gpus

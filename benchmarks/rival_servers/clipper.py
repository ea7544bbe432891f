"""Clipper (NSDI 2017): batch sizes by additive increase and multiplicative decrease."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.rival_servers.central import CentralServer, Choice
from symphony_serve.messages import Dispatch
from symphony_serve.model_side import Model

#: Source: section 4.3.1 of Clipper: the size grows by a fixed amount while batches keep the SLO, and is reduced by 10 %
#: when one does not.
GROWTH = 1
REDUCTION = 0.9


class Clipper(CentralServer):
    """First come first served, nothing is refused; each model has a batch size that is found by trial."""

    refuses = False

    def __init__(self, models: Iterable[Model]):
        super().__init__(models)
        self._sizes = dict.fromkeys(self._models, 1.0)

    def _choose(self, now: float) -> Choice | None:
        waiting = [(queue[0][2].arrival, name) for name, queue in self._queues.items() if queue]
        if not waiting:
            return None
        name = min(waiting)[1]
        return Choice(name, 0, min(len(self._queues[name]), int(self._sizes[name])))

    def _done(self, dispatch: Dispatch) -> None:
        model, size = self._models[dispatch.model], self._sizes[dispatch.model]
        grown = size * REDUCTION if dispatch.seconds > model.slo else size + GROWTH
        self._sizes[dispatch.model] = max(1.0, min(grown, model.profile.max_batch))

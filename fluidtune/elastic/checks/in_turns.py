"""Several workers of one trial in one process: their threads run one at a time, and hand over at each collective.

Each has its own random streams and torch functions, as a process has: they are put in place when it goes on. A worker
that waits for one that has ended, or for another kind of collective, ends at once with `CannotDivide`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..data.loop_draws import DROPOUTS
from ..errors import CannotDivide
from ..group.current_session import use_in_this_thread
from ..random_streams import capture_streams, restore_streams
from ..transport.base import CollectiveBackend
from ..transport.membership import Address

Value = TypeVar("Value")


class InTurns:
    """``run`` runs one function for each of ``workers`` ranks; ``as_session``: what its thread finds as its session."""

    as_session = staticmethod(use_in_this_thread)

    def __init__(self, workers: int) -> None:
        self.world = workers
        self._changed = threading.Condition()
        self._turn = 0
        self._ended: set[int] = set()
        #: For each worker, how many collectives it has come to; for each of these, what the workers brought.
        self._reached = [0] * workers
        self._brought: dict[int, dict[int, tuple[str, Any]]] = {}

    def run(self, play: Callable[[int], Value]) -> list[Value]:
        """``play(rank)`` of each rank. Raises the first error, in the order of time, but a `CannotDivide` last."""
        results: dict[int, Value] = {}
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            try:
                self._wait_for_turn(rank)
                _restore_functions(before)
                results[rank] = play(rank)
            except BaseException as error:
                errors.append(error)
            finally:
                with self._changed:
                    self._ended.add(rank)
                    self._pass_on(rank)

        before = _functions()
        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _restore_functions(before)
        for error in sorted(errors, key=lambda error: isinstance(error, CannotDivide)):
            raise error
        return [results[rank] for rank in range(self.world)]

    def exchange(self, rank: int, kind: str, value: Any) -> list[Any]:
        """What all ranks brought to this collective, in the order of ranks."""
        with self._changed:
            number = self._reached[rank]
            self._reached[rank] += 1
            brought = self._brought.setdefault(number, {})
            brought[rank] = (kind, value)
            if len(brought) < self.world:
                streams, functions = capture_streams(), _functions()
                while len(brought) < self.world:
                    if self._ended - brought.keys():
                        raise CannotDivide(f"a worker waits in {kind} for one that has ended its step without it")
                    self._pass_on(rank)
                    self._wait_for_turn(rank)
                restore_streams(streams)
                _restore_functions(functions)
            if any(kind != other for other, _ in brought.values()):
                doing = " and ".join(other for other, _ in brought.values())
                raise CannotDivide(f"the workers do different things at once: {doing}")
            self._brought.pop(number - 1, None)  # every worker here has taken what it needs of the one before
            return [brought[r][1] for r in range(self.world)]

    def _pass_on(self, rank: int) -> None:
        """Let the next worker run that has not ended."""
        others = [(rank + step) % self.world for step in range(1, self.world + 1)]
        self._turn = next((other for other in others if other not in self._ended), -1)
        self._changed.notify_all()

    def _wait_for_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)


#: What a group replaces in torch (`batchnorm`, `loop_draws`): owners and names.
_REPLACED: tuple[tuple[Any, str], ...] = (
    (torch.nn.SyncBatchNorm, "forward"),
    *((torch.nn.functional, name) for name in ("batch_norm", *DROPOUTS)),
)


def _functions() -> list[Any]:
    return [getattr(owner, name) for owner, name in _REPLACED]


def _restore_functions(functions: list[Any]) -> None:
    for (owner, name), function in zip(_REPLACED, functions, strict=True):
        setattr(owner, name, function)


class TurnBackend(CollectiveBackend):
    """The collectives of one rank of an `InTurns`; its group exists from the start."""

    def __init__(self, turns: InTurns, rank: int, device: str) -> None:
        super().__init__(device=device)
        self._turns = turns
        self.rank, self.world, self.generation = rank, turns.world, 0

    def serve(self) -> Address:
        return self.host, 0

    def dissolve(self, *, orderly: bool = False) -> None:
        self.rank, self.world = 0, 1

    def _form(self, *_: Any) -> None:
        raise CannotDivide("a rehearsal has one group")

    def _dissolve(self, in_order: bool) -> None: ...

    def _give_up(self) -> None:
        """Nothing waits: `InTurns` finds ranks in different collectives."""

    def _allreduce_(self, tensor: torch.Tensor) -> None:
        parts = self._turns.exchange(self.rank, f"a sum of {tuple(tensor.shape)}", tensor.clone())
        tensor.copy_(torch.stack(parts).sum(0))

    def _broadcast_(self, tensor: torch.Tensor) -> None:
        parts = self._turns.exchange(self.rank, f"a broadcast of {tuple(tensor.shape)}", tensor.clone())
        tensor.copy_(parts[0])

"""A follower: it serves a leader with replicas of modules, and has nothing of the script.

It checks calls, and computes parts of them, forward and backward. It keeps the graph of a part until its backward or
until the leader says that there is none. It ends when its leader does.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fluidtune.device_kinds import of_torch
from fluidtune.error_lines import failure

from .batch_statistics import Merge
from .checks import Check, Question
from .computation import Computation, Modes, Streams, part_modes
from .description import Marks
from .flags import under
from .followers import REPLICAS
from .meeting import Address, Lost, Refused, connect
from .tensor_link import Link, Message
from .trees import Classes, StaysWhole, Tree
from .weights import ReplicaWeights

__all__ = ["Follower", "Refused"]

#: Seconds in which a leader takes a follower in. Judgement: it does so in a thread of its own.
_WELCOME_S = 60.0


class _Left(Exception):
    """A forward has written what its module keeps."""


class _Stopped(Exception):
    """The leader wants no answer to its request."""


@dataclass
class _Held:
    """What this process has of one of the leader's modules."""

    weights: ReplicaWeights
    replicas: dict[bytes, nn.Module] = field(default_factory=dict)
    waiting: dict[bytes, bytes] = field(default_factory=dict)


class Follower:
    """``worker``: its name. ``device``: "cpu", or "cuda": of what the leader has on a GPU. ``pickling``: see
    `Description`.
    """

    def __init__(
        self, trial: str, worker: str, secret: bytes, device: str = "cpu", pickling: ModuleType = pickle
    ) -> None:
        self.trial, self.worker = trial, worker
        self._secret, self._device, self._classes = secret, torch.device(device), Classes(pickling)
        #: From `attach` on.
        self._link: Link
        self._held: dict[int, _Held] = {}
        #: By key of a call, its part, and what that was computed under.
        self._graphs: dict[int, tuple[Computation, Modes]] = {}

    def attach(self, address: Address) -> None:
        """Connect to the leader; from its next call on this process takes part.

        Raises:
            OSError: there is no leader, or it cannot be reached.
            Refused: it does not take this follower.
        """
        connection, shared = connect(address, self._secret, self.worker)
        try:
            self._link = Link(connection, shared, self._device)
            welcome = self._link.receive(_WELCOME_S)
            if welcome.kind == "pair":
                from .pair import Pair

                self._link.pair = Pair(*welcome.value)
                self._link.pair.meet()
                welcome = self._link.receive(_WELCOME_S)
        except Lost as error:
            raise ConnectionResetError(f"the leader has gone: {error}") from error
        if welcome.kind != "welcome":
            raise Refused(str(welcome.value))

    def run(self) -> None:
        """Serve the leader until it needs this process no more, or is gone."""
        try:
            while True:
                self._serve(self._link.receive())
        except Lost:
            return

    def close(self) -> None:
        """End the connection; idempotent. Any thread: `run` returns."""
        if hasattr(self, "_link"):
            self._link.close()

    def _serve(self, message: Message) -> None:
        link, kind, value = self._link, message.kind, message.value
        if kind == "module":
            self._take_module(*value)
        elif kind == "classes":
            self._classes.take(value)
            for held in self._held.values():
                held.replicas.clear()
        elif kind == "weights":
            key, changed, layouts, new = value
            self._held[key].weights.take(changed, layouts, new, message.tensors, link)
            self._build(key)
        elif kind == "forget":
            for key in value["modules"]:
                self._held.pop(key, None)
            for key in value["calls"]:
                self._graphs.pop(key, None)
        elif kind in ("check", "forward", "backward"):
            try:
                if kind == "check":
                    answer = self._check(value, message.tensors)
                else:
                    answer = self._forward(value, message.tensors) if kind == "forward" else self._backward(message)
            except Lost:
                raise
            except _Stopped:
                answer = "raised", "stopped", []
            except Exception as error:
                # For a check there may be no memory now, while there is for the parts.
                short = kind == "check" and isinstance(error, (MemoryError, torch.OutOfMemoryError))
                answer = ("unknown", None, []) if short else ("raised", failure(error), [])
            link.send(*answer)
            fatal = of_torch(self._device.type).fatal
            if fatal is not None and fatal in str(answer[1]):
                raise RuntimeError(str(answer[1]))  # no later call on this device succeeds in this process

    # -- modules

    def _take_module(self, key: int, digest: bytes, skeleton: bytes, trained: list[bool]) -> None:
        held = self._held.get(key)
        if held is None or held.weights.trained != trained:
            held = self._held[key] = _Held(ReplicaWeights(trained))
        held.waiting[digest] = skeleton
        if held.weights.tensors:
            self._build(key)

    def _build(self, key: int) -> None:
        """Make the replicas whose weights have come."""
        held = self._held[key]
        link = self._link
        for digest, skeleton in held.waiting.items():
            try:
                held.replicas.pop(digest, None)
                held.replicas[digest] = Tree(skeleton, tuple(held.weights.tensors), self._classes).value()
                link.send("ready", (key, digest, None))
            except Exception as error:
                link.send("ready", (key, digest, failure(error)))
            for oldest in list(held.replicas)[:-REPLICAS]:  # as the leader counts them
                del held.replicas[oldest]
        held.waiting.clear()

    # -- calls

    def _gather(self, row: torch.Tensor, merge: Merge) -> torch.Tensor:
        link = self._link
        link.send("row", None, [row])
        message = link.receive()
        if message.kind != "rows":
            raise _Stopped
        return merge(message.tensors[0].clone())

    def _check(self, value: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[str, Any, list[torch.Tensor]]:
        """The kind of the answer tells whether such calls can be divided."""
        question: Question = value["question"]
        known, weights = len(self._classes), self._held[value["module"]].weights.tensors
        own, streams = self._taken(tensors, value["draws"])
        given = Tree(value["skeleton"], tuple(own), self._classes)
        try:
            answer, output = Check(question, weights, given, streams).answer()
        except StaysWhole as error:
            return "undivided", str(error), []
        finally:
            unknown = len(self._classes) - known
            self._classes.forget(known)
        if unknown:  # the leader sends those first
            return "unknown", None, []
        return "divided", answer, output

    def _taken(self, tensors: list[torch.Tensor], draws: int) -> tuple[list[torch.Tensor], Streams]:
        """What has come, before it is written over; the last ``draws`` are random streams."""
        own = [tensor.clone() for tensor in tensors]
        states = [own.pop() for _ in range(draws)][::-1]
        return own, Streams(self._device if len(states) > 1 else None, states)

    def _forward(self, value: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[str, Any, list[torch.Tensor]]:
        started = time.perf_counter()
        held = self._held[value["module"]]
        replica = held.replicas[value["digest"]]
        own, streams = self._taken(tensors, value["draws"])
        trained = [tensor for tensor in held.weights.tensors if tensor.requires_grad]
        given = Tree(value["skeleton"], tuple(own), self._classes)
        modes = part_modes(bool(streams.states), value["statistics"], value["cut"], self._gather)
        if streams.states:
            streams.restore()
        with under(value["flags"]):
            marks = Marks(replica)
            made = Computation(replica, trained, given, value["needs"], modes)
            if marks.put_back():
                raise _Left("it leaves something behind")
        if value["graded"]:
            self._graphs[value["key"]] = made, modes
        said = {
            "skeleton": made.output.skeleton,
            "requires": made.requires,
            "drawn": Streams(streams.device).digest if streams.states else None,
            "seconds": time.perf_counter() - started,
        }
        return "outputs", said, [tensor.detach() for tensor in made.output.tensors]

    def _backward(self, message: Message) -> tuple[str, Any, list[torch.Tensor]]:
        value = message.value
        part, modes = self._graphs[value["key"]] if value["keep"] else self._graphs.pop(value["key"])
        come = iter([tensor.clone() for tensor in message.tensors])
        found = part.gradients([next(come) if there else None for there in value["have"]], modes, value["keep"])
        return "gradients", [each is not None for each in found], [each for each in found if each is not None]

"""Several trials in one process, each with its own loop in its own thread, whose models are trained as one.

    trials = FusedTrials()
    for config in configs:
        trials.start(str(config), loop, config)
    outcomes = trials.join()

A loop hands its model and optimizer over by ``current_trial().prepare(model, optimizer)`` and is written as for one
trial. One loop runs at a time (`baton`); where several have called alike models, the calls are done as one
(`fused_call`). Each optimizer steps over all of its parameters at once (`flat_steps`). A trial may come at any time.
One that ends or raises leaves the others as they are. What cannot be done for several trials is done for each by
itself, and `FusedTrial.reasons` says why, one line for each reason.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..random_streams import Streams, capture_streams
from . import interception
from .alikeness import Shape
from .baton import Baton, Request, Runner
from .flat_steps import NUMBERS, FlatStep
from .fused_call import WRITES, Call, FusedCall, signature, take_apart
from .own_streams import OwnStreams
from .stack_memory import Slot, Stack, refuse_shared
from .stacked_tensor import NotFusable

_of_thread = threading.local()


def current_trial() -> FusedTrial | None:
    """The trial whose loop runs in this thread."""
    return getattr(_of_thread, "trial", None)


class FusedTrial:
    """One trial: what its loop calls, and how it ended."""

    def __init__(self, name: str, trials: FusedTrials, streams: Streams, main: Callable[[], Any]) -> None:
        self.name = name
        self._trials = trials
        self._runner = Runner(name, OwnStreams(streams))
        self._slots: dict[int, Slot] = {}
        self._optimizers: dict[int, FlatStep] = {}
        self._taken: list[Any] = []
        self._main = main
        #: Why something of this trial is not done together with others, in the order in which it was found.
        self.reasons: list[str] = []
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"fused {name}", daemon=True)

    # -- the host's side --

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None: for ever). Whether the loop has ended: `value` or `error` is set."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the loop's side: its thread --

    def prepare(self, *objects: Any) -> None:
        """Hand over models and optimizers, after they are complete and on their device; others are left alone.

        The trials that have been started and have prepared nothing so far come first, so that all call together.
        """
        for model in objects:
            if isinstance(model, nn.Module) and id(model) not in self._slots:
                self._take_model(model)
        for optimizer in objects:
            if type(optimizer) in NUMBERS and id(optimizer) not in self._optimizers:
                for slot in self._slots.values():
                    mine = {id(p) for p in slot.parts.parameters}
                    if mine == {id(p) for group in optimizer.param_groups for p in group["params"]}:
                        self._optimizers[id(optimizer)] = FlatStep(optimizer, slot)
                        self._take(optimizer)
        if not self._elsewhere():
            self._wait(None)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what blocks (a report, a queue, a sleep): the others go on meanwhile.

        What is in it must not draw random numbers.
        """
        with self._trials.baton.apart(self._runner):
            yield

    # -- `Intercepted` --

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a prepared model, with the others' if they can be done as one."""
        slot = self._slots.get(id(model))
        if slot is None or self._elsewhere():
            return nn.Module._call_impl(model, *args, **kwargs)
        request = self._request(slot, args, kwargs)
        self._wait(request)
        if request is None:
            return nn.Module._call_impl(model, *args, **kwargs)
        if request.result is None:
            return self._call_alone(slot, args, kwargs)
        fused, row = request.result
        return fused.value(row)

    def step(self, optimizer: Optimizer) -> bool:
        """One step of a prepared optimizer over all parameters at once."""
        one = self._optimizers.get(id(optimizer))
        if one is None or self._elsewhere():
            return False
        try:
            return one.step()
        except Exception as error:
            del self._optimizers[id(optimizer)]
            self.note(f"{type(optimizer).__name__} steps by itself: {_line(error)}")
            return False

    def _call_alone(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that met no other. What its forward writes may be why, as a count of its calls is never the same."""
        value = nn.Module._call_impl(slot.model, *args, **kwargs)
        if slot.stack is not None and slot.attributes.written():
            self.part(slot, WRITES)
        return value

    def _elsewhere(self) -> bool:
        """In a thread of the user's own, or within common work."""
        return current_trial() is not self or self._trials.performing

    def _wait(self, request: Request | None) -> None:
        self._trials.baton.wait(self._runner, request)
        if request is not None and request.error is not None:
            self.note(f"common work was not done: {_line(request.error)}")

    def _request(self, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request | None:
        stack = slot.stack
        if stack is None or len(stack.slots) < 2:
            return None
        if torch.is_autocast_enabled(slot.parts.parameters[0].device.type):
            self.note(f"{type(slot.model).__name__} is trained by itself under autocast")
            return None
        tensors: list[torch.Tensor] = []
        try:
            key, build = take_apart([list(args), dict(kwargs)], tensors)
            variant = stack.variant(slot)
        except NotFusable as reason:
            self.part(slot, str(reason))
            return None
        if not tensors:
            return None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), slot.learns
        call = Call(
            slot,
            self._runner.streams,
            tensors,
            lambda given: tuple(build(given)),
            self._wait,
            lambda reason: self.part(slot, reason),
        )
        whole = (stack, "call", key, variant, signature(tensors), modes)
        return Request(whole, self._trials.perform_call, stack.took.get("call", math.inf), call)

    # -- what is together, and what is not --

    def part(self, slot: Slot, reason: str) -> None:
        """Train this model by itself from now on."""
        self.note(f"{type(slot.model).__name__} is trained by itself: {reason}")
        self._trials.leave(slot)

    def note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _take_model(self, model: nn.Module) -> None:
        try:
            slot = Slot(self, model)
            refuse_shared(slot, self._slots.values())
        except NotFusable as reason:
            self.note(f"{type(model).__name__} is trained by itself: {reason}")
            return
        same = sum(other.parts.shape == slot.parts.shape for other in self._slots.values())
        self._slots[id(model)] = slot
        self._take(model)
        self._trials.join_stack(slot, same)

    def _take(self, taken: Any) -> None:
        self._taken.append(taken)  # keeps it, so that its id stays its own
        interception.TAKEN[id(taken)] = self

    def _run(self) -> None:
        _of_thread.trial = self
        baton = self._trials.baton
        with torch.autograd.set_multithreading_enabled(False):
            baton.enter(self._runner)
            try:
                self.value = self._main()
            except BaseException as error:
                self.error = error
            finally:
                self._release()
                self._main = lambda: None
                baton.end(self._runner)

    def _release(self) -> None:
        for slot in self._slots.values():
            self._trials.leave(slot)
        for taken in self._taken:
            interception.TAKEN.pop(id(taken), None)
        self._taken.clear()


class FusedTrials:
    """The trials of one process. ``streams``: those with which a trial begins that is given none (None: the process').

    The process' random streams, default dtype and the like are the running trial's; the host should not draw.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self._streams = capture_streams() if streams is None else streams
        self._host = OwnStreams.of_process()
        self.baton = Baton()
        self.trials: list[FusedTrial] = []
        #: Common work is being done.
        self.performing = False
        self._stacks: dict[tuple[Shape, int], Stack] = {}
        interception.install()

    def start(self, name: str, loop: Callable[..., Any], *args: Any, streams: Streams | None = None) -> FusedTrial:
        """Run ``loop(*args)`` as a trial, in a thread of its own. ``streams``: those with which it begins."""
        trial = FusedTrial(name, self, self._streams if streams is None else streams, lambda: loop(*args))
        self.trials.append(trial)
        trial._thread.start()
        self.baton.add(trial._runner)
        return trial

    def join(self) -> list[FusedTrial]:
        """Wait for all trials, and give the process its own random streams and torch's own functions back."""
        for trial in self.trials:
            trial.join()
        self._host.put()
        interception.uninstall()
        return self.trials

    # -- for the trials --

    def join_stack(self, slot: Slot, number: int) -> None:
        """``number``: how many models of this shape the trial has handed over before."""
        stack = self._stacks.setdefault((slot.parts.shape, number), Stack(slot.parts.shape))
        if stack.reason is not None:
            slot.trial.note(f"{type(slot.model).__name__} is trained by itself: {stack.reason}")
            return
        stack.add(slot)
        unlike = _unlike(slot, stack)
        if unlike:
            slot.trial.note(f"{type(slot.model).__name__} differs from that of another trial in {unlike}")

    def leave(self, slot: Slot) -> None:
        """Give a model memory of its own again."""
        if slot.stack is not None:
            slot.stack.remove(slot)

    def perform_call(self, requests: list[Request]) -> None:
        """Do these calls as one. Where that fails, each trial does its own, from now on."""
        calls: list[Call] = [request.data for request in requests]
        stack: Stack = requests[0].key[0]  # type: ignore[index]
        for call in calls:
            name = stack.moved(call.slot) if call.slot.row is not None else None
            if name is not None:
                call.part(f"its {name} was replaced or moved")
        here = [request for request in requests if request.data.slot.stack is stack]
        if len(here) < 2:
            return
        learning, inference = here[0].key[-1][:2]  # type: ignore[index]
        began = time.perf_counter()
        self.performing = True
        try:
            stack.settle()
            here.sort(key=lambda request: request.data.slot.row)
            with (
                torch.inference_mode() if inference else nullcontext(),
                torch.set_grad_enabled(learning),
                torch.autocast(stack.flat.device.type, enabled=False),
            ):
                fused = FusedCall(stack, [request.data for request in here], learning, here[0].key[1:])  # type: ignore[index]
        except Exception as error:
            line = _line(error)
            reason = line if isinstance(error, NotFusable) else f"its forward fails for several trials: {line}"
            for slot in list(stack.slots):
                slot.trial.part(slot, reason)
            stack.refuse(reason)
            return
        finally:
            self.performing = False
        stack.took["call"] = time.perf_counter() - began
        for row, request in enumerate(here):
            request.result = fused, row


def _line(error: Exception) -> str:
    """What is said of an error, in one line."""
    text = f"{type(error).__name__}: {error}" if not isinstance(error, NotFusable) else str(error)
    return text.splitlines()[0]


def _unlike(slot: Slot, stack: Stack) -> str:
    """The attributes in which a model differs for good from the first one of its stack; "": none."""
    try:
        if stack.variant(slot) == stack.variant(stack.slots[0]):
            return ""
    except NotFusable:
        return ""  # its trial says it with its next call
    both = slot.attributes.values, stack.slots[0].attributes.values
    ours, others = ([(name, value) for name, value in values if name != "training"] for values in both)
    names = [name for (name, value), (_, theirs) in zip(ours, others, strict=False) if value != theirs]
    return ", ".join(dict.fromkeys(names)) or ("" if len(ours) == len(others) else "its attributes")

"""Steps of a trial's loop, computed both ways before the trial grows: whole by one worker, and divided among two.

A new worker does it, before it enters the group, so the trial trains on meanwhile. It runs the trial's code three times
up to its first optimizer steps: once alone, and once as each of two workers, which take turns in this process
(`in_turns`). All begin with the same random streams, and so with the same weights and the same first batch. If the
contract of `elastic.prepare` holds, the gradients differ by the rounding of sums in another order only.

What is drawn for each sample differs with the width and must not be taken for an error. So dropout is off meanwhile,
and the dataset draws from a stream that the sample's index seeds. If the loop itself draws such numbers and the
gradients differ, the code runs again with draws that give every sample the same (`steady_draws`). If it draws by other
means than torch's, nothing is known, and it is taken for a loop that cannot be divided.

"unknown" is what says nothing about the loop, as where two workers do not fit the device together: such a trial grows,
and the common batches after the growth compare its workers.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader

from fluidtune.torch_flags import flag, set_flag

from ..alike.digests import plain_leaves
from ..data.attribution import BatchesAtHand
from ..data.gradients import largest_of
from ..data.loader import iterates_itself
from ..data.loop_draws import DROPOUTS, PartsOfDataset, drawing_from, same_streams
from ..data.plain_state import State
from ..data.precision import FLAGS, Precision
from ..data.steering import steppers
from ..data.trial_state import steers
from ..data.whole_batches import in_whole_batches
from ..errors import GroupLost
from ..group.session import ElasticSession
from ..random_streams import Streams, capture_streams, restore_streams
from .in_turns import InTurns, TurnBackend
from .steady_draws import SteadyDraws
from .verdict import Verdict

#: Workers among which the step is divided: an error of the contract shows with two, and each costs a run of the code.
_WORKERS = 2
#: Batches without an optimizer step, after which the gradients accumulated so far are compared.
_MOST_BATCHES = 16
#: Steps of each optimizer that are compared, at the same weights, at least and at most. Where the samples of one batch
#: happen to divide evenly, a loss that is no mean shows at the next. Eight samples of two classes divide evenly with a
#: probability of 0.27, and at three steps in a row with 0.02: that was seen. At eight steps it is 3e-5.
_STEPS, _MOST_STEPS = 3, 8
#: Seconds of the run alone after which no more than the least steps are compared: the growth waits for the check.
_SECONDS = 4.0
#: Bytes of gradients that a run may keep for that; one step is compared always.
_KEPT = 2**28
#: Roundings (of float32, or of a finer type) of the largest gradient of any step, up to which an optimizer's whole
#: gradient is none: where terms cancel, as behind a softmax, a gradient that is 0 is off by a few of them.
_ROUNDINGS = 16

_DREW = Verdict("unknown", "a step draws random numbers for each sample")
_IN_DOUBT = (
    "a step draws random numbers for each sample, and not by torch's functions alone: whether it can be divided cannot "
    "be told (draw them by torch, or in the dataset)"
)


class Enough(BaseException):
    """The loop has done what is compared."""


def rehearse(run: Callable[[], Any], *, device: str = "cpu") -> Verdict:
    """Compare the gradients of the first steps. ``run`` runs the trial's code once; each run has its own session."""
    if device.startswith("cuda"):
        torch.cuda.init()  # a GPU without a random stream would keep what the first run draws
    begun = capture_streams()
    try:
        with _steady_arithmetic() as precision:
            verdict = _both_ways(run, device, begun, precision, steady=False)
            if verdict is _DREW:
                steady = _both_ways(run, device, begun, precision, steady=True)
                verdict = Verdict("differs", _IN_DOUBT) if steady.kind == "unknown" else steady
            return verdict
    finally:
        restore_streams(begun)
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()  # the memory of another process, in which the trial trains


def _both_ways(run: Callable[[], Any], device: str, begun: Streams, precision: Precision, *, steady: bool) -> Verdict:
    """``steady``: with draws that give every sample the same."""
    try:
        (alone,) = _play(run, 1, device, begun, None, steady=steady)
    except Exception as error:
        return Verdict("unknown", f"the loop failed alone: {error!r}")
    if alone.gradients and not alone.divisible:
        return Verdict("differs", "the loop has prepared no DataLoader: every worker would compute everything")
    try:
        first, *_ = _play(run, _WORKERS, device, begun, alone.steps, steady=steady)
    except torch.OutOfMemoryError as error:
        return Verdict("unknown", f"two workers did not fit the device together: {error}".splitlines()[0])
    except GroupLost as error:
        return Verdict("differs", str(error))
    except Exception as error:
        return Verdict("differs", f"divided among {_WORKERS} workers the loop fails: {error!r}")
    # What the loop itself has switched on is on in a trial as well.
    return _compare(alone, first, precision, torch.device(device))


# -- what is recorded --


@dataclass
class _Record:
    """What one worker has computed. ``gradients``: by the number of the optimizer, its step, and the parameter's name."""

    gradients: dict[tuple[int, int, str], torch.Tensor | None] = field(default_factory=dict)
    streams: Streams | None = None
    #: The GPU's random stream has moved between the first batch and the step.
    drew_on_gpu: bool = False
    #: Steps of each optimizer after which the loop was ended.
    steps: int = _MOST_STEPS
    #: It has prepared a DataLoader.
    divisible: bool = False
    #: At the end: weights by name, where no step moves them; and plain values by the type of what has them.
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: list[tuple[str, list[Any]]] = field(default_factory=list)


class _Watch(BatchesAtHand):
    """Ends the loop when it fetches a batch after its first step."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def fetching(self) -> None:
        self._recorder.fetching(learns=not self.nothing_learns())


class _Recorder:
    """``steps``: how many steps of each optimizer are compared; None: those that fit `_SECONDS`."""

    def __init__(self, steps: int | None) -> None:
        self.record = _Record()
        self._wanted = steps
        self._since = time.monotonic()
        self._names: dict[int, str] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[torch.nn.Module] = []
        self._steering: list[Any] = []
        self._start: dict[str, torch.Tensor] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._batches = 0
        self._bytes = 0  # of the gradients in the record
        #: By optimizer: steps so far; and, while one steps, the settings of its groups that say how large a step is.
        self._steps: Counter[int] = Counter()
        self._rates: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        #: (optimizer, step) whose gradients are in the record, or were not worth it.
        self._recorded: set[tuple[int, int]] = set()
        self._gpu_stream: torch.Tensor | None = None

    def add(self, part: Any) -> None:
        """A prepared object."""
        if isinstance(part, torch.nn.Module):
            self._modules.append(part)
            for name, parameter in part.named_parameters():
                self._name_of(parameter, name)
        if steers(part) or isinstance(part, State):
            self._steering.append(part)
        if isinstance(part, torch.optim.Optimizer) and part not in self._optimizers:
            for each in steppers(part):
                self._optimizers.append(each)
                each.register_step_pre_hook(self._stepping)
                each.register_step_post_hook(self._stepped)

    def _name_of(self, parameter: torch.Tensor, name: str) -> str:
        """The parameter's name; ``name``: if it is not known so far."""
        if id(parameter) not in self._names:
            name = name if name not in self._parameters else f"{name} ({len(self._parameters)})"
            self._names[id(parameter)] = name
            self._parameters[name] = parameter
        return self._names[id(parameter)]

    @property
    def begun(self) -> bool:
        """Whether the loop has fetched a batch to learn from."""
        return self._batches > 0

    def fetching(self, *, learns: bool) -> None:
        """The loop asks for a batch. ``learns``: to learn from it."""
        if self._steps and (not learns or self._bytes >= _KEPT or self._enough_steps()):
            raise Enough
        if self._batches >= _MOST_BATCHES:
            raise Enough
        if not learns:
            return
        self._batches += 1
        if self._batches == 1:
            self._gpu_stream = _gpu_stream()
            if not self._optimizers:
                self._start = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def _enough_steps(self) -> bool:
        wanted = self._wanted
        if wanted is None:
            wanted = _MOST_STEPS if time.monotonic() < self._since + _SECONDS else _STEPS
        done = min(self._steps.values())
        if done >= wanted:
            self.record.steps = done
        return done >= wanted

    def _stepping(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step begins: its gradients are kept, and it gets a learning rate of 0, so that the next is comparable.

        LBFGS searches no line meanwhile: along one of length 0 it fails.
        """
        number = self._optimizers.index(optimizer)
        still: dict[str, Any] = {"lr": 0.0, "line_search_fn": None}
        self._rates[number] = [(g, {key: g[key] for key in still if key in g}) for g in optimizer.param_groups]
        for group, rates in self._rates[number]:
            rate = rates.get("lr")
            group.update({key: still[key] for key in rates})
            if isinstance(rate, torch.Tensor):
                group["lr"] = torch.zeros_like(rate)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self._keep(number, optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        number = self._optimizers.index(optimizer)
        for group, rates in self._rates.pop(number):
            group.update(rates)
        if (number, self._steps[number]) not in self._recorded:  # a closure has computed the gradients
            self._keep(number, optimizer)
        self._steps[number] += 1

    def _keep(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        step = self._steps[number]
        self._recorded.add((number, step))
        if step >= _MOST_STEPS or (step and self._bytes >= _KEPT):
            return
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = self._name_of(parameter, f"number {i} of optimizer {number}")
            gradient = None if parameter.grad is None else parameter.grad.detach().to("cpu", copy=True)
            self.record.gradients[number, step, name] = gradient
            self._bytes += 0 if gradient is None else gradient.nbytes
        self._note_streams()

    def finish(self) -> _Record:
        """The loop has ended: without a step, its gradients, or its own updates, are what it has computed."""
        if not self.record.gradients:
            for name, parameter in self._parameters.items():
                if name in self._start:
                    self.record.gradients[0, 0, name] = parameter.detach() - self._start[name]
                else:
                    gradient = None if parameter.grad is None else parameter.grad.detach().clone()
                    self.record.gradients[0, 0, name] = gradient
            self._note_streams()
        self.record.plain = [(type(part).__name__, plain_leaves(part.state_dict())) for part in self._steering]
        if self._optimizers and all("lr" in group for each in self._optimizers for group in each.param_groups):
            named = [pair for module in self._modules for pair in module.state_dict(keep_vars=True).items()]
            self.record.weights = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in named
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            }
        return self.record

    def _note_streams(self) -> None:
        self.record.streams = capture_streams()
        before, now = self._gpu_stream, _gpu_stream()
        self.record.drew_on_gpu = now is not None and (before is None or not torch.equal(before, now))


class _Session(ElasticSession):
    """The session of one worker in a rehearsal: it ends before its second boundary at the latest."""

    def __init__(self, backend: TurnBackend, device: str, steps: int | None) -> None:
        super().__init__(trial="rehearsal", worker=f"w{backend.rank}", leader=True, backend=backend, device=device)
        self.leader = False  # for the trial's code
        self.recorder = _Recorder(steps)
        self._member.batches = _Watch(self.recorder)
        self._member.likeness.weights_due = lambda at_batch=False: False  # type: ignore[method-assign]  # at the end
        self._member.state.set_width(backend.world)

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        if any(isinstance(part, DataLoader) for part in objects):
            self.recorder.record.divisible = True
        objects = tuple(_steady(part) if isinstance(part, DataLoader) else part for part in objects)
        prepared = super().prepare(*objects)
        for part in prepared:
            self.recorder.add(part)
            if isinstance(part, torch.nn.Module):
                _without_dropout(part)
        return prepared

    def epochs(self, start: int, stop: int) -> Iterator[int]:
        for epoch in super().epochs(start, stop):
            yield epoch
            raise Enough

    def before_epoch(self, epoch: int, stop: int | None) -> int | None:
        if self._in_framework:
            raise Enough
        return super().before_epoch(epoch, stop)

    def boundary(self, done: int | None = None) -> int:
        if self._next_step is not None:
            raise Enough
        return super().boundary(done)


def _play(
    run: Callable[[], Any], workers: int, device: str, begun: Streams, steps: int | None, *, steady: bool
) -> list[_Record]:
    """Run the code as this many workers, up to ``steps`` steps; what each has computed. Raises what the code raises."""
    turns = InTurns(workers)

    def play(rank: int) -> _Record:
        restore_streams(begun)
        session = _Session(TurnBackend(turns, rank, device), device, steps)
        draws = SteadyDraws(lambda: session.recorder.begun) if steady else contextlib.nullcontext()
        with turns.as_session(session), draws:
            try:
                # A thread of autograd, which the workers share, must not wait for another worker.
                with torch.autograd.set_multithreading_enabled(False):
                    run()
            except Enough:
                pass
            finally:
                session.close()
        return session.recorder.finish()

    return turns.run(play)


# -- the comparison --


def _compare(alone: _Record, divided: _Record, precision: Precision, device: torch.device) -> Verdict:
    """``precision``: what the step was computed with."""
    if not any(gradient is not None for gradient in alone.gradients.values()):
        return Verdict("unknown", "the loop computed no gradient of what it has prepared")
    if alone.gradients.keys() != divided.gradients.keys():
        return Verdict("differs", f"divided among {_WORKERS} workers the loop steps other parameters than alone")
    sizes = {key: largest_of(gradient) for key, gradient in alone.gradients.items()}
    if not all(map(math.isfinite, sizes.values())):
        return Verdict("unknown", "the gradients are not finite")
    scales: dict[tuple[int, int], float] = {}  # by an optimizer and its step
    for (optimizer, step, _), size in sizes.items():
        scales[optimizer, step] = max(size, scales.get((optimizer, step), 0.0))
    dtypes = {g.dtype for g in alone.gradients.values() if g is not None and g.dtype.is_floating_point}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    rounding = _ROUNDINGS * min(eps, torch.finfo(torch.float32).eps) * max(sizes.values())
    worst, name, of = 0.0, "", 1.0
    for key, gradient in alone.gradients.items():
        off, scale = _difference(gradient, divided.gradients[key]), scales[key[:2]]
        if not off <= (rounding if scale <= rounding else worst * scale):
            worst, name, of = (off / scale if scale else math.inf), key[2], scale
    if worst <= precision.tolerance(device, eps):
        other = _state_apart(alone, divided, precision.tolerance(device, eps))
        return Verdict("same") if other is None else Verdict("differs", other)
    if _drew_by_sample(alone, divided):
        return _DREW
    return Verdict(
        "differs",
        f"divided among {_WORKERS} workers the gradient of {name} is off by {worst:.2g} of the largest gradient "
        f"({of:.2g}): see what elastic.prepare says of losses, or give the trial one worker",
    )


def _state_apart(alone: _Record, divided: _Record, allowed: float) -> str | None:
    """What else the steps have changed in another way, where the gradients are the same."""
    for (name, mine), (_, theirs) in zip(alone.plain, divided.plain, strict=True):
        if len(mine) != len(theirs) or not all(_equal(a, b, allowed) for a, b in zip(mine, theirs, strict=True)):
            return (
                f"divided among {_WORKERS} workers {name} is not what it is alone, as after a step(loss) with the loss "
                "of a worker's part: give it elastic.mean()'s, once an epoch"
            )
    for name, weights in alone.weights.items():
        other = divided.weights.get(name)
        if other is None or other.shape != weights.shape or not weights.is_floating_point():
            continue
        if not _difference(weights, other) <= allowed * max(1.0, largest_of(weights)):
            return (
                f"divided among {_WORKERS} workers {name} is not what it is alone, though no optimizer has moved it: a "
                "layer writes it from the samples of its worker's part, as Embedding(max_norm=...) does"
            )
    return None


def _equal(a: Any, b: Any, allowed: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=allowed, abs_tol=allowed)
    return bool(a == b)


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return largest_of(a if b is None else b)
    off = largest_of(a.double() - b.double())
    return math.inf if math.isnan(off) else off


def _drew_by_sample(alone: _Record, divided: _Record) -> bool:
    """Whether a share of the batch has drawn other numbers than the whole batch.

    A GPU's stream moves by more than is drawn, so there each draw counts.
    """
    if alone.drew_on_gpu or alone.streams is None or divided.streams is None:
        return True
    a, b = ({name: s[name] for name in s if name != "cuda"} for s in (alone.streams, divided.streams))
    return not same_streams(a, b)


def _gpu_stream() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


# -- what is held still meanwhile --


class _SteadyDataset(PartsOfDataset):
    """A dataset that draws the same for a sample in every worker and at any time."""

    #: DataLoader would ask for a whole batch at once.
    __getitems__ = None  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        with drawing_from(zlib.crc32(repr(index).encode())):
            return super().__getitem__(index)


def _steady(loader: DataLoader) -> DataLoader:
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or loader.batch_sampler is None:
        return loader  # `prepare` refuses it
    if iterates_itself(loader):
        return loader
    if in_whole_batches(loader.dataset, loader.collate_fn, loader.num_workers):
        return loader  # draws nothing for a sample
    batches: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if loader.batch_size is not None:  # the loop may ask for it
        batches = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return DataLoader(
        _SteadyDataset(loader.dataset), collate_fn=loader.collate_fn, generator=loader.generator, **batches
    )


def _without_dropout(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif isinstance(part, torch.nn.RNNBase | torch.nn.MultiheadAttention):
            part.dropout = 0.0


def _nothing_dropped(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return input


@contextlib.contextmanager
def _steady_arithmetic() -> Iterator[Precision]:
    """No dropout, no TF32, and no clipping by the norm, which would hide a wrong factor, meanwhile.

    Yields the precision of the numbers that are computed with.
    """
    functional, precision = torch.nn.functional, Precision()
    dropouts = dict(DROPOUTS)
    clip = torch.nn.utils.clip_grad_norm_
    flags = {path: flag(torch.backends, path) for of in FLAGS.values() for path in of}
    try:
        for name in dropouts:
            DROPOUTS[name] = _nothing_dropped
            setattr(functional, name, _nothing_dropped)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.nn.utils.clip_grad_norm_ = lambda parameters, max_norm, *args, **kwargs: clip(
            parameters, math.inf, *args, **kwargs
        )
        precision.watch()
        yield precision
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
        precision.end()
        DROPOUTS.update(dropouts)
        for name, function in dropouts.items():
            setattr(functional, name, function)
        for path, value in flags.items():
            if flag(torch.backends, path) != value:
                set_flag(torch.backends, path, value)

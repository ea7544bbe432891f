"""What a loop draws at random between two batches is the same in all workers, and what is drawn for samples is not.

The leader's random streams go on as they would alone, and a batch's indices bring them to the others whenever they have
moved. So a choice a batch (``random.random() < 0.5``, with Python's, numpy's or torch's default stream) is the same
everywhere. What a dataset draws for its samples comes from other streams, one for each worker. The dropout of torch.nn
draws each worker's own numbers, and moves the loop's streams by the same in all.
Other numbers that the loop draws for each sample, such as ``torch.randn_like``, are then the same in the first, second
.. samples of each worker's part.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from ..random_streams import Streams, capture_streams, restore_streams

_TORCHS: dict[str, Callable[..., Any]] = {
    name: getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}
#: The functions of torch.nn.functional that draw for each sample, by name, as this process has them where no trial has
#: several workers (`rehearsal` has others meanwhile, which draw nothing); torch.nn's modules call them there.
DROPOUTS = dict(_TORCHS)


class LeadersStreams:
    """The streams of the loop, as the leader sends them. ``gpu``: the GPU of the trial's tensors; see `random_streams`."""

    def __init__(self, gpu: str = "cuda") -> None:
        self._gpu = gpu
        self._sent: Streams | None = None
        #: The loop has drawn between two batches.
        self.drawn = False

    def restart(self) -> None:
        """The group is a new one: its followers have other streams."""
        self._sent = None

    def look(self) -> None:
        """Leader, between two batches of one reading: whether the loop has drawn since the last one."""
        self.drawn = self.drawn or (self._sent is not None and not same_streams(self._sent, capture_streams(self._gpu)))

    def news(self) -> Streams | None:
        """Leader: the streams, if the followers have others."""
        now = capture_streams(self._gpu)
        if self._sent is not None and same_streams(self._sent, now):
            return None
        self._sent = now
        return now

    def take(self, streams: Streams | None) -> None:
        """Go on from what the leader has sent, or had sent last, as its own have not moved since.

        A follower's may have: a module with dropout may have had samples of its part alone. In the leader itself what
        it has sent changes nothing.
        """
        self._sent = self._sent if streams is None else streams
        if self._sent is not None:
            restore_streams(self._sent, self._gpu)


def same_streams(a: Streams, b: Streams) -> bool:
    """Whether both would give the same numbers."""
    if a.keys() != b.keys() or a.get("python") != b.get("python"):
        return False
    for name in ("torch", "cuda"):
        if name in a and not torch.equal(a[name], b[name]):
            return False
    if "numpy" not in a:
        return True
    mine, theirs = a["numpy"], b["numpy"]
    return bool(mine[2:] == theirs[2:] and numpy.array_equal(mine[1], theirs[1]))


class Part(list[Any]):
    """The indices of the samples that a worker gets of a batch. ``seed``: of what the dataset draws for them."""

    def __init__(self, indices: list[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return Part, (list(self), self.seed)


class PartsOfDataset(Dataset):
    """A dataset that is asked for a `Part` at a time. What it draws for the samples does not move the loop's streams.

    What ``collate_fn`` draws is drawn once a batch, and comes from the loop's. Attributes are the dataset's: a
    ``worker_init_fn`` opens its files there.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while unpickling it is not there yet
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, part: Part) -> Any:
        at_once = getattr(self._dataset, "__getitems__", None)
        with drawing_from(part.seed):
            return at_once(list(part)) if at_once else [self._dataset[index] for index in part]


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """The process' streams begin from this seed, and are put back afterwards."""
    before = capture_streams()
    seed_streams(seed)
    try:
        yield
    finally:
        restore_streams(before)


def seed_streams(seed: int) -> None:
    """Seed what `capture_streams` captures.

    Where CUDA has not started, ``torch.manual_seed`` would note each seed, with the stack, for when it starts.
    """
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def seed_of(*names: object) -> int:
    """A seed of 32 bits for these names."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:4], "little")


class OwnDropout:
    """Replaces the dropout of torch.nn.functional in this process by one that draws each worker's own numbers.

    What a call draws follows from the state of the loop's generator and from the worker's seed, and the call moves that
    generator by the same in all workers. So whatever puts the generator back and runs the call again, as activation
    checkpointing does in the backward pass, gets the same numbers again.

    ``common``: whether the batch is one that all workers compute whole: then all draw from the loop's.
    """

    def __init__(self, common: Callable[[], bool]) -> None:
        self._common = common
        self._seed = 0
        self._enabled = False

    def enable(self, enabled: bool, seed: int = 0) -> None:
        """Replace torch's dropout, or restore it. ``seed``: this worker's."""
        self._seed = seed
        if enabled != self._enabled:
            self._enabled = enabled
            for name, function in DROPOUTS.items():
                setattr(F, name, self._by_worker(name) if enabled else function)

    def _by_worker(self, name: str) -> Callable[..., Any]:
        trains = inspect.signature(DROPOUTS[name]).parameters["training"].default

        def dropped(input: torch.Tensor, p: float = 0.5, training: bool = trains, inplace: bool = False) -> Any:
            function = DROPOUTS[name]
            draws = training and p and function is _TORCHS[name]
            if not draws or torch.compiler.is_compiling() or self._common():
                return function(input, p, training, inplace)
            with self._drawing(input.device):
                return function(input, p, training, inplace)

        return dropped

    @contextmanager
    def _drawing(self, device: torch.device) -> Iterator[None]:
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        state = generator.get_state().numpy().tobytes()
        generator.manual_seed(_seed_after(state, self._seed.to_bytes(8, "little")))
        try:
            yield
        finally:
            generator.manual_seed(_seed_after(state, b"the loop"))


def _seed_after(state: bytes, whose: bytes) -> int:
    """A seed of 64 bits that follows from a generator's state: all of its chain would be short with fewer."""
    return int.from_bytes(hashlib.blake2b(state, digest_size=8, key=whose).digest(), "little")

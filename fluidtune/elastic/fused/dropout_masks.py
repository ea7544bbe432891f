"""What dropout draws for the trials of one call: each from its own stream, by the operator that it uses alone.

On cores torch's dropout fills a tensor like its input by ``bernoulli_`` (``_dropout_impl`` in
aten/src/ATen/native/Dropout.cpp). On a GPU it is one kernel, ``native_dropout``, except in place, for whole channels
and in attention. Which number of the stream belongs to which number of the tensor depends there on the tensor's
strides, and on how its memory is aligned (``get_vector_size`` in aten/src/ATen/native/cuda/Dropout.cu). So a mask is
drawn for a tensor of one trial's shape and order of strides, in memory of its own, as most tensors have it that a
forward drops out of. Where a trial alone has another one, `FusedCall` finds that its outputs are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor as T
from torch.nn import functional as F

from . import own_streams
from .own_streams import OwnStreams
from .stacked_tensor import NotFusable


def on_gpu(x: T) -> bool:
    """Whether torch drops out by kernels of a GPU. (Tests let it be true on cores, which have the same operators.)"""
    return x.is_cuda


class Draws:
    """The streams of a call's trials. `keep` lets them be where they are after what was drawn."""

    def __init__(self, streams: Sequence[OwnStreams]) -> None:
        self._streams = streams
        self._states: list[T] = []
        self._of_gpu = False
        self._generator: torch.Generator = torch.default_generator

    @property
    def drawn(self) -> bool:
        return bool(self._states)

    def masks(self, shape: torch.Size, rates: Sequence[float], like: T, *, inplace: bool, channels: bool) -> T:
        """A mask of ``shape`` for each trial, scaled, for dropping out of ``like``. ``channels``: whole ones.

        Raises:
            NotFusable: they cannot be drawn as each trial alone draws its own.
        """
        one_kernel = on_gpu(like) and not inplace and not channels
        if one_kernel and like.numel() and not _dense(like):
            raise NotFusable("it drops out of a part of a tensor, for which a GPU draws in an order of its own")
        masks = like.new_empty(len(rates), *shape)
        with self._aside(like):
            for i, rate in enumerate(rates):
                if rate in (0.0, 1.0) or not like.numel():
                    masks[i].fill_(1.0 - rate)  # alone, nothing is drawn either
                    continue
                with self._stream_of(i):
                    mask = like.new_empty(shape) if channels else torch.empty_like(like[i])
                    if one_kernel:
                        masks[i] = torch.native_dropout(mask.fill_(1.0), rate, True)[0]
                    else:
                        masks[i] = mask.bernoulli_(1 - rate).div_(1 - rate)
        return masks

    def attend(
        self,
        query: T,
        key: T,
        value: T,
        masks: Sequence[T | None],
        rates: Sequence[float],
        causal: bool,
        scale: float | None,
    ) -> T:
        """The attention of each trial by itself: a GPU has several kernels for it, each with an order of its own."""
        outputs = []
        with self._aside(query):
            for i, rate in enumerate(rates):
                with self._stream_of(i):
                    outputs.append(
                        F.scaled_dot_product_attention(query[i], key[i], value[i], masks[i], rate, causal, scale=scale)
                    )
        return torch.stack(outputs)

    def keep(self) -> None:
        for streams, state in zip(self._streams, self._states, strict=False):
            if self._of_gpu:
                streams.gpu = state
            else:
                streams.torch = state

    @contextmanager
    def _aside(self, like: T) -> Iterator[None]:
        """Let the process' own stream be as it was afterwards."""
        if not self._states:
            self._begin(like)
        before = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(before)

    @contextmanager
    def _stream_of(self, row: int) -> Iterator[None]:
        self._generator.set_state(self._states[row])
        yield
        self._states[row] = self._generator.get_state()

    def _begin(self, like: T) -> None:
        if not on_gpu(like) and like.device.type == "cpu":
            self._states = [streams.torch for streams in self._streams]
            return
        generator = own_streams.gpu_generator()
        if not on_gpu(like) or generator is None or generator.device != like.device:
            raise NotFusable(f"it drops out on {like.device}, whose stream is not kept for each trial")
        states = [streams.gpu for streams in self._streams]
        self._of_gpu, self._generator = True, generator
        self._states = [generator.get_state() if state is None else state for state in states]


def _dense(x: T) -> bool:
    """Whether the numbers of ``x`` fill a piece of memory without gaps."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True

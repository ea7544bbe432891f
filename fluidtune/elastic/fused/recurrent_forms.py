"""The grouped forms of torch's recurrent layers: RNN, LSTM, GRU, and one step of each.

The inputs of all steps are multiplied by the weights at once, those of the hidden state step by step: the equations are
those in the documentation of `torch.nn.RNN`, `torch.nn.LSTM` and `torch.nn.GRU`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor as T
from torch.nn import functional as F

from . import dropout_masks
from .layer_forms import PerTrial, dropped
from .stacked_tensor import FORMS, MIXED, NotFusable, Stacked

#: The state of one layer in one direction: the hidden state, for an LSTM the cell's state too, each (K, N, H).
State = tuple[T, ...]
#: ``(of the input, of the hidden state, state)`` -> the next state; the first two are (K, N, gates * H).
Step = Callable[[T, T, State], State]


def _gru(of_input: T, of_hidden: T, state: State) -> State:
    (h,) = state
    r_in, z_in, n_in = of_input.chunk(3, -1)
    r_h, z_h, n_h = of_hidden.chunk(3, -1)
    r, z = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
    return (torch.lerp(torch.tanh(torch.addcmul(n_in, r, n_h)), h, z),)


def _lstm(of_input: T, of_hidden: T, state: State) -> State:
    i, f, g, o = (of_input + of_hidden).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _rnn(squash: Callable[[T], T]) -> Step:
    return lambda of_input, of_hidden, state: (squash(of_input + of_hidden),)


_STEPS: dict[str, Step] = {"gru": _gru, "lstm": _lstm, "rnn_tanh": _rnn(torch.tanh), "rnn_relu": _rnn(F.relu)}


def _one_direction(step: Step, x: T, state: State, weights: Sequence[T], backwards: bool) -> tuple[T, State]:
    """x: (K, L, N, I). Returns the outputs (K, L, N, H) and the last state."""
    k, length, batch, _ = x.shape
    w_in, w_hidden, b_in, b_hidden = (*weights, None, None) if len(weights) == 2 else weights
    rows = x.reshape(k, length * batch, -1)
    across = w_hidden.transpose(1, 2)
    gates = _product(rows, w_in.transpose(1, 2), b_in).view(k, length, batch, -1).unbind(1)
    outputs = []
    for of_input in reversed(gates) if backwards else gates:
        state = step(of_input, _product(state[0], across, b_hidden), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state


def _product(x: T, across: T, bias: T | None) -> T:
    return torch.bmm(x, across) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, across)


def _layers(name: str) -> Callable[..., Any]:
    """The form of ``torch.gru`` and its like, for sequences that are not packed."""
    step, parts = _STEPS[name], 2 if name == "lstm" else 1

    def grouped(
        x: T,
        hx: Any,
        params: Sequence[T],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if type(x) is not Stacked or x.dim() != 4 or not all(type(w) is Stacked for w in params):
            raise NotFusable("its recurrent layer has packed sequences, no batch, or weights of no trial")
        k, ways, each = x.shape[0], 2 if bidirectional else 1, 4 if has_biases else 2
        if len(params) != num_layers * ways * each:
            raise NotFusable("its recurrent layer has projections")
        first = [t if type(t) is Stacked else t.expand(k, *t.shape) for t in (hx if parts == 2 else (hx,))]
        x = x.transpose(1, 2) if batch_first else x
        last: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for way in range(ways):
                at = layer * ways + way
                y, state = _one_direction(
                    step, x, tuple(t[:, at] for t in first), params[at * each : (at + 1) * each], bool(way)
                )
                outputs.append(y)
                last.append(state)
            x = outputs[0] if ways == 1 else torch.cat(outputs, -1)
            if train and layer < num_layers - 1:
                if dropout_masks.on_gpu(x) and (dropout.rates if isinstance(dropout, PerTrial) else dropout):
                    raise NotFusable("its recurrent layer drops out by a stream of cuDNN's own")
                x = dropped(x, dropout)
        ends = [torch.stack([state[part] for state in last], 1) for part in range(parts)]
        return (x.transpose(1, 2) if batch_first else x, *ends)

    return grouped


def _cell(name: str) -> Callable[..., Any]:
    step, parts = _STEPS[name], 2 if name == "lstm" else 1

    def grouped(x: T, hx: Any, w_in: T, w_hidden: T, b_in: T | None = None, b_hidden: T | None = None) -> Any:
        if type(x) is not Stacked or x.dim() != 3 or type(w_in) is not Stacked:
            raise NotFusable("its recurrent cell has no batch, a constant input or weights of no trial")
        k = x.shape[0]
        state = tuple(t if type(t) is Stacked else t.expand(k, *t.shape) for t in (hx if parts == 2 else (hx,)))
        after = step(
            _product(x, w_in.transpose(1, 2), b_in), _product(state[0], w_hidden.transpose(1, 2), b_hidden), state
        )
        return after if parts == 2 else after[0]

    return grouped


for _name in _STEPS:
    FORMS[getattr(torch, _name)] = _layers(_name)
    FORMS[getattr(torch, f"{_name}_cell")] = _cell(_name)
    MIXED.update((getattr(torch, _name), getattr(torch, f"{_name}_cell")))

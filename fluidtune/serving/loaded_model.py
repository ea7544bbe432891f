"""A loaded model: what it gets of inputs, anew for each attempt, and what becomes of each input.

Inputs are what the samples are. Of Python values and of single arrays the model gets a list. Of samples that are one
array or tensor, or a dictionary of these, it gets one as well: the inputs stand along its first axis. What the model
does to its inputs changes nothing that comes after, since each attempt makes them from what has come.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.errors import BadInput
from fluidtune.serving.model_layers import has_tensors, mapped, tensor_type
from symphony_serve.errors import ServeError
from symphony_serve.forms import Form, is_array

#: What becomes of one input: the HTTP status, and the body as JSON text.
Outcome = tuple[int, str]
#: Characters of what a client is told of an error of the user's code. Judgement: three lines of a terminal.
MOST_TEXT = 300


class Packed(NamedTuple):
    """An input on its way to the process of a model. buffers: of its arrays, which Ray hands on without a copy."""

    head: bytes
    buffers: tuple[pickle.PickleBuffer, ...]

    @classmethod
    def of(cls, value: Any) -> Packed:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, 5, buffer_callback=buffers.append)
        return cls(head, tuple(buffers))

    def value(self) -> Any:
        """The input. Its arrays cannot be written to, and the rest of it is new."""
        return pickle.loads(self.head, buffers=self.buffers)


class Samples(NamedTuple):
    """Inputs that a model can answer, and its outputs for them: JSON values, with arrays of NumPy in them."""

    inputs: list[Any]
    outputs: list[Any]


class LoadedModel:
    """The model of a trial, and its samples. Raises ServeError if it has none, or fails with them."""

    def __init__(self, name: str, model: Any):
        self._name, self._model = name, model
        given = getattr(model, "samples", None)
        rows = _rows(given)
        if rows is None:
            said = f"the samples of trial {name} are a {type(given).__name__}, expected a list of inputs"
            raise ServeError(f"{said}, an array or a tensor of them, or a dictionary of arrays of one length")
        if not rows:
            said = f"the model that load returned for trial {name} has no samples"
            raise ServeError(f"{said}; set its attribute samples to a list of inputs, with which it is measured")
        #: Whether the inputs of a batch become one; and, if it has tensors, what an input or that one is like.
        self._whole = not isinstance(given, list | tuple)
        like = given if self._whole else rows[0]
        self._like = like if has_tensors(like) else None
        inputs = mapped(rows, is_array, array_of)
        self.form = Form.of(inputs)
        try:
            outputs = outputs_of(name, model, self.batch([Packed.of(one) for one in inputs]), len(inputs))
        except ServeError:
            raise
        except Exception as error:
            said = f"the model of trial {name} fails with its own samples: {in_a_line(error)}"
            raise ServeError(f"{said}; check load") from error
        self.samples = Samples(inputs, [self._seen(one) for one in outputs])

    def _seen(self, output: Any) -> Any:
        """An output for a sample as clients see it, but with arrays. Raises ServeError if it is an error."""
        status, text = outcome_of(output)
        value = json.loads(text)
        if status != 200:
            raise ServeError(f"the model of trial {self._name} fails with one of its samples: {value['error']}")
        if isinstance(output, dict):
            return value | {key: array_of(one) for key, one in output.items() if is_array(one)}
        return array_of(output) if is_array(output) else value

    def batch(self, packed: Sequence[Packed]) -> Any:
        """The inputs as the model gets them."""
        given: Any = [self.form.given(one.value()) for one in packed]
        if self._whole:
            return _in_tensors(_stacked(given), self._like)
        return [_in_tensors(one, self._like) for one in given]

    def attempt(self, packed: Sequence[Packed]) -> list[Outcome]:
        """What becomes of each of these inputs in one batch. Raises what the model does, and ServeError."""
        return [outcome_of(one) for one in outputs_of(self._name, self._model, self.batch(packed), len(packed))]


def outputs_of(name: str, model: Callable[[Any], Any], given: Any, count: int) -> list[Any]:
    """The ``count`` outputs of the model. Raises as `called`, and ServeError for another number of outputs."""

    def listed() -> list[Any]:
        returned = model(given)
        return list(array_of(returned) if is_array(returned) else returned)

    outputs = called(listed)
    if len(outputs) != count:
        said = f"the model of trial {name} returned {len(outputs)} outputs for {count} inputs"
        raise ServeError(f"{said}; return as many")
    return outputs


def called(function: Callable[..., Any], *given: Any) -> Any:
    """What code of the user returns. Raises the Exception that it does.

    What is none would end the process, with its other models and versions, so it becomes a RuntimeError.
    """
    try:
        return function(*given)
    except (Exception, NeedsPlainProcess):
        raise
    except BaseException as error:
        raise RuntimeError(f"it ends its process: {in_a_line(error)}") from None


def outcome_of(output: Any) -> Outcome:
    """What becomes of an input with this output. An exception is the error of this input alone."""
    if isinstance(output, BaseException):
        return failed(output)
    try:
        return 200, json.dumps(as_json(output) if is_array(output) else output, allow_nan=False, default=as_json)
    except Exception as error:
        said = f"an output is no JSON value ({in_a_line(error, str)})"
        return failed(ServeError(f"{said}; return numbers, text, lists, objects or arrays"))


def failed(error: BaseException, where: str = "") -> Outcome:
    """What becomes of an input with which the model has raised this. where: in which part of it."""
    if isinstance(error, BadInput):
        return 400, json.dumps({"error": in_a_line(error, str), "code": "bad_input"})
    return 500, json.dumps({"error": f"the model failed{where}: {in_a_line(error)}", "code": "model_failed"})


def in_a_line(error: BaseException, text_of: Callable[[Any], str] = repr) -> str:
    """An error of the user's code in one line of `MOST_TEXT` characters at most, whatever its class does."""
    try:
        text = " ".join(text_of(error).split())
    except BaseException as another:
        text = f"{type(error).__name__}, whose text fails with {type(another).__name__}"
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def as_json(value: Any) -> Any:
    """An array as lists, in which null stands for what is no finite number. Raises TypeError for what is no array."""
    if not is_array(value):
        raise TypeError(f"it has a value of type {type(value).__name__}")
    array = array_of(value)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        wrong, array = ~np.isfinite(array), array.astype(object)
        array[wrong] = None
    return array.tolist()


def array_of(value: Any) -> np.ndarray:
    """The array of NumPy with these values. It has no bfloat16: float32 holds all of its values."""
    if isinstance(value, tensor_type()):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _rows(samples: Any) -> list[Any] | None:
    """The inputs in a model's samples; None: they cannot be samples."""
    if isinstance(samples, list | tuple | None):
        return list(samples or ())
    if isinstance(samples, Mapping):
        columns = list(map(_rows, samples.values())) if all(map(is_array, samples.values())) else []
        alike = columns and None not in columns and len(set(map(len, columns))) == 1  # type: ignore[arg-type]
        return [dict(zip(samples, row, strict=True)) for row in zip(*columns, strict=True)] if alike else None  # type: ignore[arg-type]
    return list(samples) if is_array(samples) and samples.ndim else None


def _in_tensors(value: Any, like: Any) -> Any:
    """The value with tensors of these types on these devices, where ``like`` has some."""
    if isinstance(like, Mapping):
        return {key: _in_tensors(one, like[key]) for key, one in value.items()}
    if isinstance(like, list) and like:
        return [_in_tensors(one, like[0]) for one in value]
    if isinstance(like, tensor_type()):
        return sys.modules["torch"].from_numpy(value).to(like.device, like.dtype)
    return value


def _stacked(given: list[Any]) -> Any:
    """Arrays as one, in which they stand along the first axis; dictionaries as one of such arrays."""
    if isinstance(given[0], dict):
        return {key: _stacked([one[key] for one in given]) for key in given[0]}
    return np.stack(given)

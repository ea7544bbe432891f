"""The Open Inference Protocol (version 2) over HTTP: batches of inputs and outputs as tensors, without a server.

Source: github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md. Binary tensors are those of
Triton's extension ``binary_tensor_data``, which its public client uses by default.

The first dimension of each tensor is the number of inputs in the request. An object is one tensor for each of its keys.
Any other input is the tensor "input", any other output is "output". A value that is no tensor (null, a list of objects,
lists of different lengths) is an element of BYTES that holds its JSON text, and the tensor says so in its parameters.
Where the samples have arrays, an input is one as well, and has the bytes that came.

msgspec reads and checks a request, and writes an answer, by the types of this module; `openapi` has their schemas.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from fluidtune import __version__
from symphony_serve.errors import ServeError
from symphony_serve.forms import Form, is_array

#: The header that says how many bytes of the body are JSON; the binary tensors follow. Source: Triton's extension.
JSON_SIZE = "Inference-Header-Content-Length"
#: The parameter ``content_type`` of a tensor whose elements are JSON texts.
JSON_TEXT = "application/json"
#: Datatype -> numpy's name for it; BYTES has none. Source: "Tensor Data Types"; binary data is little-endian.
_NUMPY = {
    **{"BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8"},
    **{"INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"},
}
#: NumPy's type of arrays -> the datatype. numpy has no BF16, so such data becomes FP32, which holds all of its values.
_DATATYPE = {str(np.dtype(name)): datatype for datatype, name in _NUMPY.items()}
_NUMPY["BF16"] = "<u2"
_NUMBERS = _NUMPY.keys() - {"BOOL"}
#: By numpy's kind of a datatype, Python's types of its elements in JSON.
_PYTHON: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "O": {str}}
#: The length of an axis. Source: the longest that numpy has (intp).
Length = Annotated[int, Meta(ge=1, le=2**63 - 1)]
#: Bytes of JSON with ``NaN`` or half of a surrogate pair, which Python's `json` alone reads: in 5 ms.
MOST_RETRIED = 256 << 10
_OBJECT = frozenset({"object"})
_LIST = frozenset({"list"})


class TensorParameters(Struct, omit_defaults=True):
    """Of a tensor of a request or an answer. shared_memory_region is refused."""

    binary_data_size: Annotated[int, Meta(ge=0)] | None = None
    content_type: str | None = None
    shared_memory_region: Any = UNSET


class TensorData(Struct, omit_defaults=True):
    """A tensor of a request or an answer; data: nested as the shape says, or flat."""

    name: str
    shape: Annotated[list[Length], Meta(min_length=1)]
    datatype: str
    parameters: TensorParameters | None = None
    data: list[Any] | UnsetType = UNSET


class OutputParameters(Struct):
    """classification and shared_memory_region are refused."""

    binary_data: bool | None = None
    classification: Any = UNSET
    shared_memory_region: Any = UNSET


class WantedOutput(Struct):
    """A tensor that the answer is to have."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(Struct):
    """timeout: whole microseconds; 0: none. sequence_id is refused."""

    binary_data_output: bool | None = None
    timeout: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    sequence_id: Any = UNSET


class InferenceRequest(Struct):
    """The JSON of a request."""

    inputs: Annotated[list[TensorData], Meta(min_length=1)]
    id: str | None = None
    parameters: RequestParameters | None = None
    outputs: list[WantedOutput] | None = None


class InferenceResponse(Struct, omit_defaults=True):
    """The JSON of an answer."""

    model_name: str
    outputs: list[TensorData]
    model_version: str | None = None
    id: str | None = None


def server_metadata() -> dict[str, Any]:
    return {"name": "fluidtune", "version": __version__, "extensions": ["binary_tensor_data"]}


@dataclass(frozen=True)
class Tensor:
    """What a client must know of a tensor. shape: without the batch; -1: any length. texts: elements are JSON texts.

    array: the model has arrays here; null is NaN then.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] = ()
    texts: bool = False
    array: bool = False

    def metadata(self) -> dict[str, Any]:
        parameters = {"parameters": {"content_type": JSON_TEXT}} if self.texts else {}
        return {"name": self.name, "datatype": self.datatype, "shape": [-1, *self.shape], **parameters}


@dataclass(frozen=True)
class Asked:
    """An inference request.

    inputs: one for each of the batch. outputs: the tensors that are wanted -> whether as binary data; empty: all, and
    ``binary`` says how. timeout_s: seconds in which the client wants the answer, from Triton's parameter "timeout".
    """

    id: str | None
    inputs: list[Any]
    outputs: Mapping[str, bool]
    binary: bool = False
    timeout_s: float | None = None


@dataclass(frozen=True)
class Interface:
    """The tensors of a model, and how requests and answers have them.

    outputs: empty, if none was seen yet. keyed: each output is an object, with a key for each of these tensors; else it
    is the only one of them.
    """

    form: Form
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    keyed: bool

    @classmethod
    def of(cls, samples: Sequence[Any], outputs: Sequence[Any] = ()) -> Interface:
        """That of a model with these sample inputs, and these outputs for them as far as they are known."""
        inputs, found = [
            tuple(_tensor(name, values, ragged=True)[0] for name, values in columns.items())
            for columns in (_columns(samples, "input"), _columns(outputs, "output") if outputs else {})
        ]
        return cls(Form.of(samples), inputs, found, keyed=bool(_keys(outputs)))

    def metadata(self, model: str, versions: Sequence[str]) -> dict[str, Any]:
        inputs, outputs = ([tensor.metadata() for tensor in some] for some in (self.inputs, self.outputs))
        about = {"name": model, "versions": list(versions), "platform": "fluidtune_python"}
        return {**about, "inputs": inputs, "outputs": outputs}

    def decode(self, headers: Mapping[str, str], body: bytes, most: int) -> Asked:
        """The request in a body. most: inputs that it may have. Raises ServeError.

        headers: by names in small letters, or whatever their letters. The time is linear in the bytes of the body.
        """
        request, binary = _parts(headers.get(JSON_SIZE.lower()), body)
        parameters = request.parameters or RequestParameters()
        _refuse(parameters, "the request", "sequence_id", "send each input for itself, without a sequence")
        columns = self._decode_inputs(request.inputs, binary, most)
        if self.form.words == _OBJECT and self.form.keys:
            inputs = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        else:
            inputs = columns["input"]
        trouble = Form(_LIST, self.form).trouble(inputs, "the batch")
        if trouble is not None:
            raise ServeError(trouble)
        wants_binary = parameters.binary_data_output or False
        wanted = dict(self._wanted(one, wants_binary) for one in request.outputs or ())
        timeout_s = parameters.timeout / 1e6 if parameters.timeout else None
        return Asked(request.id, inputs, wanted, wants_binary, timeout_s)

    def encode(
        self, asked: Asked, model: str, version: str | None, texts: Sequence[str]
    ) -> tuple[bytes, dict[str, str]]:
        """The answer with these outputs as JSON texts, one for each input: its body and headers.

        Of outputs that differ from those of the samples it has the tensors that the metadata names. Each says of itself
        what it holds. Raises ServeError if that cannot be.
        """
        columns = self._answered([read_json(text, "an output is no JSON text", most=len(text)) for text in texts])
        wanted = asked.outputs or dict.fromkeys(columns, asked.binary)
        _known(wanted, columns)
        described: list[TensorData] = []
        binary: list[bytes] = []
        for name, as_binary in wanted.items():
            declared = next((each for each in self.outputs if each.name == name), None)
            tensor, elements = _tensor(name, columns[name], declared)
            parameters = TensorParameters(content_type=JSON_TEXT if tensor.texts else None)
            if as_binary:
                binary.append(_to_bytes(tensor.datatype, elements))
                parameters.binary_data_size = len(binary[-1])
            one = TensorData(name, [len(texts), *tensor.shape], tensor.datatype)
            one.parameters = parameters if tensor.texts or as_binary else None
            one.data = UNSET if as_binary else elements
            described.append(one)
        response = InferenceResponse(model, described, version, asked.id)
        try:
            text = msgspec.json.encode(response)
        except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
            text = json.dumps(msgspec.to_builtins(response)).encode()
        if not binary:
            return text, {"Content-Type": "application/json"}
        return b"".join([text, *binary]), {"Content-Type": "application/octet-stream", JSON_SIZE: str(len(text))}

    def check_outputs(self, names: Iterable[str]) -> None:
        """Raises ServeError for a name of an output that the model is known not to have."""
        if self.outputs:
            _known(names, [tensor.name for tensor in self.outputs])

    def _answered(self, outputs: Sequence[Any]) -> dict[str, list[Any]]:
        """The values of each tensor of an answer. Raises ServeError for an output without keys, if all have some."""
        if not self.outputs:
            return _columns(outputs, "output")
        if not self.keyed:
            return {self.outputs[0].name: list(outputs)}
        names = [tensor.name for tensor in self.outputs]
        for one in outputs:
            if not isinstance(one, dict):
                wanted = f"expected an object with the keys {' and '.join(map(repr, names))}, as for its samples"
                raise ServeError(f"an output of the model is a {type(one).__name__}, {wanted}")
        return {name: [one.get(name) for one in outputs] for name in names}

    def _decode_inputs(self, given: list[TensorData], binary: memoryview, most: int) -> dict[str, list[Any]]:
        """The values of each tensor, as many as the batch has inputs."""
        expected = {tensor.name: tensor for tensor in self.inputs}
        columns: dict[str, list[Any]] = {}
        at = 0
        for one in given:
            name = one.name
            if name not in expected or name in columns:
                wrong = "the input {} is there twice" if name in columns else "the model has no input {}"
                what = wrong.format(_said(name))
                raise ServeError(f"{what}; send {' and '.join(map(repr, expected))} once each")
            columns[name], size = _decode(one, expected[name], binary, at, most)
            at += size
        if len(columns) < len(expected):
            raise ServeError(f"the input {min(expected.keys() - columns.keys())!r} is missing")
        if at != len(binary):
            raise ServeError(f"{len(binary)} bytes follow the JSON, and binary_data_size says {at} for all inputs")
        if len({len(values) for values in columns.values()}) > 1:
            numbers = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
            raise ServeError(f"the first dimension, the number of inputs, differs: {numbers}")
        return {name: columns[name] for name in expected}

    def _wanted(self, one: WantedOutput, binary: bool) -> tuple[str, bool]:
        self.check_outputs([one.name])
        parameters = one.parameters or OutputParameters()
        _refuse(parameters, f"the output {_said(one.name)}", "classification", "ask for the tensor itself")
        _refuse(parameters, f"the output {_said(one.name)}", "shared_memory_region", "let it come in the body")
        return one.name, binary if parameters.binary_data is None else parameters.binary_data


def _known(names: Iterable[str], there: Sequence[str] | Mapping[str, Any]) -> None:
    for name in names:
        if name not in there:
            raise ServeError(f"the model has no output {_said(name)}; it has {' and '.join(map(repr, there))}")


# The request's JSON.


def _parts(size: str | None, body: bytes) -> tuple[InferenceRequest, memoryview]:
    """The request's JSON object, and the binary data behind it."""
    if size is None:
        end = len(body)
    elif size.isascii() and size.isdecimal() and len(size) < 20 and int(size) <= len(body):
        end = int(size)
    else:
        raise ServeError(f"{JSON_SIZE} is {_said(size)}, expected the bytes of the JSON, {len(body)} at most")
    whole = memoryview(body)
    return read_json(whole[:end], "the request is no JSON of the protocol", InferenceRequest, nan=True), whole[end:]


def read_json(text: Any, wrong: str, kind: Any = Any, nan: bool = False, most: int = MOST_RETRIED) -> Any:
    """A JSON text as a value of the type ``kind``. Raises ServeError, which begins with ``wrong``.

    text: or its bytes in UTF-8. nan: ``NaN`` is read. most: bytes of the longest text with half of a surrogate pair.
    """
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            if isinstance(error, msgspec.ValidationError) or len(text) > most:
                raise
            found = json.loads(text if isinstance(text, str) else str(text, "utf-8"))
            if not nan:
                json.dumps(found, allow_nan=False)
            return msgspec.convert(found, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ServeError(f"{wrong}: {error}") from None


def _refuse(parameters: Struct, where: str, field: str, remedy: str) -> None:
    if getattr(parameters, field) is not UNSET:
        raise ServeError(f"{where} has the parameter {field}, which is not served; {remedy}")


def _said(value: Any) -> str:
    """What a client has sent, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


# From tensors to values.


def _decode(one: TensorData, tensor: Tensor, binary: memoryview, at: int, most: int) -> tuple[list[Any], int]:
    """The values of a tensor of a request, and how many bytes of ``binary`` it has from ``at`` on."""
    name, datatype = tensor.name, one.datatype
    parameters = one.parameters or TensorParameters()
    _refuse(parameters, f"the input {name!r}", "shared_memory_region", "send the data in the body")
    shape = _shape(one.shape, tensor, most)
    if datatype != tensor.datatype and not {datatype, tensor.datatype} <= _NUMBERS:
        raise ServeError(f"datatype of {name!r} is {_said(datatype)}, expected {tensor.datatype!r}")
    count, size = math.prod(shape), parameters.binary_data_size
    if (size is None) == (one.data is UNSET):
        raise ServeError(f"the input {name!r} needs either data or the parameter binary_data_size")
    if size is None and datatype == "BF16":
        raise ServeError(f"data of {name!r} is BF16, which JSON has not; send it as binary data, or as FP32")
    if size is None:
        array = _from_json(one.data, one.shape, count, datatype, name, tensor.array)
    elif size > len(binary) - at:
        said = f"expected the bytes of its data, {len(binary) - at} at most"
        raise ServeError(f"binary_data_size of {name!r} is {_said(size)}, {said}")
    elif datatype == "BYTES":
        array = np.array(list(_texts(bytes(binary[at : at + size]), count, name)), object)
    elif size != count * np.dtype(_NUMPY[datatype]).itemsize:
        raise ServeError(f"binary_data_size of {name!r} is {size}; its shape {list(shape)} has {count} {datatype}")
    else:
        array = np.frombuffer(binary, _NUMPY[datatype], count, at)
    if datatype == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    array = array.reshape(shape)
    if tensor.array:
        return list(_held(array, np.dtype(_NUMPY[tensor.datatype]), name)), size or 0
    values = array.tolist()
    wrong = f"an element of {name!r} is no JSON text"
    return [read_json(text, wrong) for text in values] if tensor.texts else values, size or 0


def _held(array: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """The array in the type of the samples. Raises ServeError if that is one of integers that cannot hold a value."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = array.astype(dtype, copy=False)
    if dtype.kind in "iu" and not (found == array).all():
        raise ServeError(f"data of {name!r} has a value that {dtype}, the type of the samples, cannot hold")
    return found


def _shape(shape: list[int], tensor: Tensor, most: int) -> list[int]:
    """The lengths of its axes. Those of 1 behind all that are expected are left out: MLServer's codecs send [n, 1]."""
    expected = [-1, *tensor.shape]
    while len(shape) > len(expected) and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != len(expected) or not all(want in (-1, is_) for is_, want in zip(shape, expected, strict=True)):
        said = "-1 being a length of 1 or more, the first one the number of inputs"
        raise ServeError(f"shape of {tensor.name!r} is {_said(shape)}, expected {expected}, {said}")
    if shape[0] > most:
        raise ServeError(f"shape of {tensor.name!r} has more than {most} inputs; send them in several requests")
    return shape


def _from_json(data: Any, shape: list[int], count: int, datatype: str, name: str, array: bool) -> np.ndarray:
    """data: nested as the shape says, or flat. array: null is NaN."""
    flat = data
    if flat and isinstance(flat[0], list) and len(flat) == shape[0]:
        for length in shape[1:]:
            if not all(type(inner) is list and len(inner) == length for inner in flat):
                raise ServeError(f"data of {name!r} is nested in another way than its shape {shape}")
            flat = list(itertools.chain.from_iterable(flat))
    if len(flat) != count:
        raise ServeError(f"data of {name!r} has {len(flat)} elements; its shape {shape} has {count}")
    dtype: np.dtype[Any] = np.dtype(_NUMPY.get(datatype, object))
    if array and dtype.kind == "f":
        flat = [math.nan if one is None else one for one in flat] if None in flat else flat
    wrong = set(map(type, flat)) - _PYTHON[dtype.kind]
    if wrong:
        raise ServeError(f"data of {name!r} has a {min(one.__name__ for one in wrong)}, which is no {datatype}")
    # numpy 1 wraps such integers around.
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= min(flat) <= max(flat) <= np.iinfo(dtype).max:
        raise ServeError(f"data of {name!r} has an integer that {datatype} cannot hold")
    try:
        with np.errstate(over="ignore"):  # infinite ones are refused by the form
            return np.array(flat, dtype)
    except OverflowError:
        raise ServeError(f"data of {name!r} has an integer that {datatype} cannot hold") from None


def _texts(binary: bytes, count: int, name: str) -> Iterator[str]:
    """The elements of BYTES: each has its length before it, 4 bytes."""
    at = found = 0
    while at < len(binary) and found < count:
        (length,) = struct.unpack_from("<I", binary, at) if at + 4 <= len(binary) else (len(binary),)
        text, at, found = binary[at + 4 : at + 4 + length], at + 4 + length, found + 1
        try:
            yield text.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ServeError(f"an element of {name!r} is no text in UTF-8: {error.reason}") from None
    if at != len(binary) or found != count:
        said = "each has its length in 4 bytes before it"
        raise ServeError(f"the binary data of {name!r} is not {count} elements of BYTES; {said}")


# From values to tensors.


def _columns(values: Sequence[Any], name: str) -> dict[str, list[Any]]:
    """The values of each tensor. name: of the only one, if the values are not all objects with the same keys."""
    keys = _keys(values)
    return {key: [one[key] for one in values] for key in keys} if keys else {name: list(values)}


def _keys(values: Sequence[Any]) -> list[str]:
    """The keys of the values, if they are all objects with the same ones."""
    if not values or not all(isinstance(one, dict) and one.keys() == values[0].keys() for one in values):
        return []
    return list(values[0])


def _tensor(
    name: str, values: list[Any], declared: Tensor | None = None, ragged: bool = False
) -> tuple[Tensor, list[Any]]:
    """The tensor that has these values, and its elements, the last dimension fastest.

    declared: as what clients expect it. ragged: lists of different lengths are a length of -1; else they are no tensor.
    """
    arrays = [np.asarray(one) for one in values if is_array(one)]
    if arrays and len({(one.dtype, one.ndim) for one in arrays}) == 1 and len(arrays) == len(values):
        axes = [{one.shape[axis] for one in arrays} for axis in range(arrays[0].ndim)]
        there = tuple(some.pop() if len(some) == 1 else -1 for some in axes)
        return Tensor(name, _DATATYPE[str(arrays[0].dtype)], there, array=True), []
    elements, shape = values, []
    while elements and all(type(one) is list for one in elements):
        lengths = {len(one) for one in elements}
        shape.append(lengths.pop() if len(lengths) == 1 else -1)
        elements = list(itertools.chain.from_iterable(elements))
    if declared is not None and declared.array and -1 not in shape and _holds(declared.datatype, elements):
        return replace(declared, shape=tuple(shape)), elements
    datatype = _datatype(elements)
    if datatype == "INT64" and declared is not None and declared.datatype == "FP64":
        datatype = "FP64"
    tensor = Tensor(name, datatype or "BYTES", tuple(shape))
    if not datatype or (-1 in shape and not ragged) or (declared is not None and declared.texts):
        return replace(tensor, datatype="BYTES", shape=(), texts=True), [json.dumps(one) for one in values]
    return tensor, elements


def _datatype(elements: list[Any]) -> str | None:
    """That which holds all the elements; None: there is none."""
    kinds = set(map(type, elements))
    if kinds in ({bool}, {str}):
        return "BOOL" if bool in kinds else "BYTES"
    if not kinds or not kinds <= {int, float}:
        return None
    least, most = min(elements), max(elements)
    if kinds == {int} and least >= -(1 << 63) and most < 1 << 63:
        return "INT64"
    return "FP64" if -sys.float_info.max <= least and most <= sys.float_info.max else None


def _holds(datatype: str, elements: list[Any]) -> bool:
    """Whether an array of this datatype has such elements in JSON."""
    dtype: np.dtype[Any] = np.dtype(_NUMPY[datatype])
    if dtype.kind == "f":
        return _datatype([one for one in elements if one is not None] or [0]) in ("INT64", "FP64")
    if set(map(type, elements)) != ({bool} if dtype.kind == "b" else {int}):
        return False
    return dtype.kind == "b" or np.iinfo(dtype).min <= min(elements) <= max(elements) <= np.iinfo(dtype).max


def _to_bytes(datatype: str, elements: list[Any]) -> bytes:
    if datatype != "BYTES":
        return np.array(elements, _NUMPY[datatype]).tobytes()
    texts = [text.encode("utf-8", "surrogatepass") for text in elements]
    return b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))

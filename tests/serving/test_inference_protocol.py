"""The Open Inference Protocol: what requests mean, what is refused, and what its public client reads."""

from __future__ import annotations

import contextlib
import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidtune.serving.inference_protocol import JSON_SIZE, Asked, Interface, server_metadata
from fluidtune.serving.loaded_model import as_json
from symphony_serve.errors import ServeError

MOST = 1000
IMAGES = Interface.of([[[0, 0.5], [1, 0]]], [{"label": "two", "odds": [0.1, 0.9]}])
PAIRS = Interface.of([{"count": 1, "word": "a"}], [1.5])


def request(*inputs, **others):
    return json.dumps({"inputs": list(inputs), **others}).encode()


def encode(interface, asked, version, outputs):
    return interface.encode(asked, "best", version, list(map(json.dumps, outputs)))


def tensor(name="input", shape=(1, 2, 2), datatype="FP32", **others):
    return {"name": name, "shape": list(shape), "datatype": datatype, **others}


def decode(interface, body, binary=b""):
    headers = {JSON_SIZE.lower(): str(len(body))} if binary else {}
    return interface.decode(headers, body + binary, MOST)


# What there is.


def test_metadata_names_the_tensors_of_samples_and_outputs():
    assert server_metadata()["extensions"] == ["binary_tensor_data"]
    found = IMAGES.metadata("best", ["1"])
    assert found["inputs"] == [{"name": "input", "datatype": "FP64", "shape": [-1, 2, 2]}]
    assert found["outputs"] == [
        {"name": "label", "datatype": "BYTES", "shape": [-1]},
        {"name": "odds", "datatype": "FP64", "shape": [-1, 2]},
    ]


@pytest.mark.parametrize(
    ("samples", "datatype", "shape", "texts"),
    [
        ([1, 2], "INT64", [-1], False),
        ([1, 2.5], "FP64", [-1], False),
        ([True], "BOOL", [-1], False),
        (["a"], "BYTES", [-1], False),
        ([[1], [1, 2]], "INT64", [-1, -1], False),
        ([[[1], [1, 2]]], "INT64", [-1, 2, -1], False),
        ([None, 1], "BYTES", [-1], True),
        ([[]], "BYTES", [-1], True),
        ([{}], "BYTES", [-1], True),
        ([[{"a": 1}]], "BYTES", [-1], True),
        ([1 << 70], "FP64", [-1], False),
        ([10**400], "BYTES", [-1], True),
    ],
)
def test_a_sample_has_a_tensor_or_is_json_text(samples, datatype, shape, texts):
    (found,) = Interface.of(samples).inputs
    about = found.metadata()
    assert (about["datatype"], about["shape"], "parameters" in about) == (datatype, shape, texts)


# Requests.


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6, 7, 8], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]])
def test_flat_and_nested_data_are_the_same_inputs(data):
    asked = decode(IMAGES, request(tensor(shape=[2, 2, 2], data=data), id="7"))
    assert (asked.id, asked.inputs) == ("7", [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])


def test_an_object_has_a_tensor_for_each_key_in_json_and_binary_together():
    words = tensor("word", [2], "BYTES", data=["a", "é"])
    counts = tensor("count", [2], "INT8", parameters={"binary_data_size": 2})
    asked = decode(PAIRS, request(words, counts), b"\x05\xff")
    assert asked.inputs == [{"count": 5, "word": "a"}, {"count": -1, "word": "é"}]


def test_what_the_client_wants_of_the_answer_is_found():
    outputs = [{"name": "odds", "parameters": {"binary_data": False}}, {"name": "label"}]
    parameters = {"binary_data_output": True, "timeout": 1500}
    asked = decode(IMAGES, request(tensor(data=[0, 0, 0, 1]), outputs=outputs, parameters=parameters))
    assert (asked.outputs, asked.binary, asked.timeout_s) == ({"odds": False, "label": True}, True, 0.0015)


GOOD = tensor(data=[0, 0, 0, 1])
BINARY = {"binary_data_size": 16}


@pytest.mark.parametrize(
    ("body", "binary", "said"),
    [
        (b"", b"", "no JSON of the protocol"),
        (b"[" * 100_000, b"", "no JSON"),
        (b"\xff", b"", "no JSON"),
        (b"\xef\xbb\xbf" + request(GOOD), b"", "no JSON of the protocol: Unexpected UTF-8 BOM"),
        (request(GOOD).decode().encode("utf-16"), b"", "no JSON of the protocol: 'utf-8' codec"),
        (request(GOOD).replace(b'"input"', b'"\xed\xa0\x80"'), b"", "no JSON of the protocol: 'utf-8' codec"),
        (b"[]", b"", "Expected `object`, got `array`"),
        (b'{"inputs": 5}', b"", r"Expected `array`, got `int` - at `\$.inputs`"),
        (request(), b"", "Expected `array` of length >= 1"),
        (request(GOOD, GOOD), b"", "twice"),
        (request(tensor("x", data=[0, 0, 0, 1])), b"", "no input 'x'; send 'input'"),
        (request(tensor("x" * 1000, data=[0, 0, 0, 1])), b"", r"x\.\.\.; send"),
        (request(GOOD, id=5), b"", r"Expected `str \| null`, got `int` - at `\$.id`"),
        (request(GOOD, outputs=[{"name": "x"}]), b"", "no output 'x'; it has 'label' and 'odds'"),
        (request(GOOD, outputs=[{}]), b"", "missing required field `name`"),
        (request(GOOD, parameters=[5]), b"", r"Expected `object \| null`, got `array` - at `\$.parameters`"),
        (request(GOOD, parameters={"timeout": -1}), b"", r"Expected `int` >= 0 - at `\$.parameters.timeout`"),
        (request(GOOD, parameters={"sequence_id": 1}), b"", "sequence_id, which is not served"),
        (request(GOOD, outputs=[{"name": "odds", "parameters": {"classification": 1}}]), b"", "classification"),
        (request(tensor(parameters={"shared_memory_region": "x"})), b"", "send the data in the body"),
        (request(tensor(datatype="BYTES", data=["a"])), b"", "datatype of 'input' is 'BYTES', expected 'FP64'"),
        (request(tensor(datatype=None, data=[1])), b"", "Expected `str`, got `null`"),
        (request(tensor(shape=[2, 2], data=[0, 0, 0, 1])), b"", r"expected \[-1, 2, 2\]"),
        (request(tensor(shape=[0, 2, 2], data=[])), b"", "Expected `int` >= 1"),
        (request(tensor(shape=[1.0, 2, 2], data=[])), b"", "Expected `int`, got `float`"),
        (request(tensor(shape=[MOST + 1, 2, 2], data=[])), b"", "more than 1000 inputs"),
        (request(tensor(shape=[1 << 80, 2, 2], data=[])), b"", "shape"),
        (request(tensor(data=[0, 0, 0])), b"", "has 3 elements"),
        (request(tensor(data=[[[0, 0], [0]]])), b"", "nested in another way"),
        (request(tensor(data=0)), b"", r"Expected `array`, got `int` - at `\$.inputs\[0\].data`"),
        (request(tensor(data=[0, 0, 0, "1"])), b"", "a str, which is no FP32"),
        (request(tensor(data=[0, 0, 0, True])), b"", "a bool, which is no FP32"),
        (request(tensor(data=[0, 0, 0, 1e300])), b"", "no finite number"),
        (request(tensor(data=[0, 0, 0, float("nan")])), b"", "no finite number"),
        (request(tensor(datatype="UINT8", data=[0, 0, 0, 256])), b"", "UINT8 cannot hold"),
        (request(tensor(datatype="FP64", data=[0, 0, 0, 10**400])), b"", "FP64 cannot hold"),
        (request(tensor()), b"", "either data or the parameter"),
        (request(tensor(data=[0, 0, 0, 1], parameters=BINARY)), bytes(16), "either data or the parameter"),
        (request(tensor(parameters=BINARY)), bytes(15), "15 at most"),
        (request(tensor(parameters=BINARY)), bytes(17), "17 bytes follow"),
        (request(tensor(parameters={"binary_data_size": -4})), bytes(16), "Expected `int` >= 0"),
        (request(tensor(parameters={"binary_data_size": 12})), bytes(12), "has 4 FP32"),
        (request(tensor(parameters=BINARY)), b"\0\0\x80\x7f" * 4, "no finite number"),
    ],
)
def test_a_bad_request_is_refused_with_its_field(body, binary, said):
    with pytest.raises(ServeError, match=said) as found:
        decode(IMAGES, body, binary)
    assert len(str(found.value)) < 400


def of_arrays(dtype):
    return Interface.of([np.zeros((2, 2), dtype)], [np.zeros(2, dtype)])


def in_binary(datatype, data):
    return request(tensor(datatype=datatype, parameters={"binary_data_size": len(data)})), data


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int64"])
def test_of_samples_that_are_arrays_an_input_has_the_bytes_that_came(dtype):
    interface, sent = of_arrays(dtype), np.array([[1, 2], [3, 0]], dtype)
    if sent.dtype.kind == "f":
        sent[0] = np.nan, np.inf
    named = interface.metadata("best", [])
    datatype = named["inputs"][0]["datatype"]
    body, data = in_binary(datatype, sent.tobytes())
    (found,) = interface.decode({JSON_SIZE.lower(): str(len(body))}, body + data, MOST).inputs
    assert found.dtype == dtype and found.tobytes() == data and not found.flags.owndata
    outputs = [[1, None if sent.dtype.kind == "f" else 5]]
    answer, headers = encode(interface, Asked(None, [], {}, True), "1", outputs)
    (told,) = np.frombuffer(answer[int(headers[JSON_SIZE]) :], dtype).reshape(1, 2)
    np.testing.assert_array_equal(told, np.array(outputs[0], dtype))
    assert named["outputs"] == [{"name": "output", "datatype": datatype, "shape": [-1, 2]}]


@pytest.mark.parametrize(
    ("body", "data", "found"),
    [
        (*in_binary("BF16", b"\x80\x3f\xc0\x7f\0\0\0\xbf"), [[1, None], [0, -0.5]]),
        (request(tensor(data=[1, None, math.nan, 2])), b"", [[1, None], [None, 2]]),
        (request(tensor(datatype="INT8", data=[1, 2, 3, -4])), b"", [[1, 2], [3, -4]]),
        (request(tensor(shape=[1, 2, 2, 1, 1], data=[[[[[1]], [[2]]], [[[3]], [[4]]]]])), b"", [[1, 2], [3, 4]]),
    ],
)
def test_other_datatypes_and_axes_of_1_become_an_array_of_the_samples_type(body, data, found):
    (got,) = decode(of_arrays("float32"), body, data).inputs
    assert got.dtype == "float32" and as_json(got) == found


@pytest.mark.parametrize("data", [[0, 0, 0, 256], [0, 0, 0, -1], [0, 0, 0, 0.5], [0, 0, 0, math.nan]])
def test_what_an_array_of_integers_cannot_hold_is_refused(data):
    datatype = "INT64" if isinstance(data[-1], int) else "FP64"
    with pytest.raises(ServeError, match="a value that uint8, the type of the samples, cannot hold"):
        decode(of_arrays("uint8"), request(tensor(datatype=datatype, data=data)))


@pytest.mark.parametrize("size", ["-1", "1e3", "99999", "9" * 30, "²", ""])
def test_a_bad_length_of_the_json_is_refused(size):
    with pytest.raises(ServeError, match=JSON_SIZE):
        IMAGES.decode({JSON_SIZE.lower(): size}, request(GOOD), MOST)


@pytest.mark.parametrize(
    "binary",
    [b"\0\0\0", b"\x05\0\0\0abc", b"\xff\xff\xff\xffabc", b"\x01\0\0\0ab", b"\x01\0\0\0\xff", b"\0\0\0\0" * 2, b"\0"],
)
def test_binary_texts_that_do_not_end_where_they_should_are_refused(binary):
    sent = request(tensor(shape=[1], datatype="BYTES", parameters={"binary_data_size": len(binary)}))
    with pytest.raises(ServeError, match="'input'"):
        decode(Interface.of(["a"]), sent, binary)


def test_tensors_of_one_request_have_the_same_number_of_inputs():
    with pytest.raises(ServeError, match="the number of inputs, differs: count 1, word 2"):
        decode(PAIRS, request(tensor("count", [1], "INT64", data=[1]), tensor("word", [2], "BYTES", data=["a", "b"])))
    with pytest.raises(ServeError, match="'word' is missing"):
        decode(PAIRS, request(tensor("count", [1], "INT64", data=[1])))


#: Half of a surrogate pair, which JSON may have, among them.
TEXT = st.text("aé€\0\ud800", max_size=3)
NAMES = st.sampled_from(["input", "name", "shape", "datatype", "data", "parameters", "binary_data_size", "id"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from(["input", "FP32"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=st.dictionaries(st.sampled_from([*GOOD, "parameters"]), JSON),
    others=st.dictionaries(st.sampled_from(["outputs", "parameters", "id"]), JSON),
    binary=st.binary(max_size=20),
)
def test_whatever_is_sent_is_read_or_refused(fields, others, binary):
    with contextlib.suppress(ServeError):
        decode(IMAGES, request({**GOOD, **fields}, **others), binary)


# Answers.

ELEMENTS = {
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "text": TEXT,
    "null": st.none() | st.integers(),
}


@st.composite
def batches(draw):
    """Values of one form, as many as a batch has inputs."""
    number = draw(st.integers(1, 3))
    keys = draw(st.lists(TEXT, max_size=2, unique=True))
    columns = [arrays(draw, number) for _ in keys or [""]]
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)] if keys else columns[0]


def arrays(draw, number):
    shape = [number, *draw(st.lists(st.integers(1, 3), max_size=2))]
    count = math.prod(shape)
    flat = draw(st.lists(ELEMENTS[draw(st.sampled_from(list(ELEMENTS)))], min_size=count, max_size=count))
    return np.array(flat, object).reshape(shape).tolist()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(values=batches(), binary=st.booleans(), known=st.booleans(), name=TEXT)
def test_what_is_encoded_is_decoded_to_the_same_values(values, binary, known, name):
    """An answer is turned into a request, whose tensors have the same form.

    Seen: half of a surrogate pair in an id was a 500 without a text, and in an output it failed the whole batch.
    """
    interface = Interface.of(values, values if known else ())
    asked = Asked(name, [], {}, binary=binary)
    body, headers = encode(interface, asked, "1", values)
    size = int(headers.get(JSON_SIZE, len(body)))
    head = json.loads(body[:size])
    assert (head.pop("model_name"), head.pop("model_version"), head["id"]) == ("best", "1", name)
    inputs = head.pop("outputs")
    if len(interface.inputs) == 1 and inputs[0]["name"] == "output":
        inputs[0]["name"] = interface.inputs[0].name
    found = decode(interface, request(*inputs, **head), body[size:])
    assert (found.inputs, found.id) == (values, name)


JSON_TEXT = {"content_type": "application/json"}
CAT, DOG = {"cat": 0.9}, {"dog": 0.8}
BOTH = Interface.of([1, 2], [CAT, DOG])
ODD = [{"label": "one", "more": 1}, {"label": "two", "odds": [0.5]}]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("interface", "outputs", "found"),
    [
        # Of different lengths.
        (Interface.of([1], [[1]]), [[1], [2, 3]], {"output": ("BYTES", JSON_TEXT, ["[1]", "[2, 3]"])}),
        # One that is known keeps its datatype.
        (PAIRS, [1, 2], {"output": ("FP64", None, [1, 2])}),
        # Seen: a batch of equal keys was answered with a tensor that the metadata does not name.
        (BOTH, [CAT], {"output": ("BYTES", JSON_TEXT, ['{"cat": 0.9}'])}),
        (BOTH, [CAT, CAT], {"output": ("BYTES", JSON_TEXT, ['{"cat": 0.9}'] * 2)}),
        (BOTH, [CAT, DOG], {"output": ("BYTES", JSON_TEXT, ['{"cat": 0.9}', '{"dog": 0.8}'])}),
        (BOTH, [5], {"output": ("BYTES", JSON_TEXT, ["5"])}),
        (IMAGES, ODD, {"label": ("BYTES", None, ["one", "two"]), "odds": ("BYTES", JSON_TEXT, ["null", "[0.5]"])}),
        # With one key that is named "output", which is no whole output.
        (Interface.of([1], [{"output": {"a": 1}}]), [{"output": 5}], {"output": ("BYTES", JSON_TEXT, ["5"])}),
    ],
)
def test_an_answer_has_the_tensors_of_the_metadata_whatever_its_outputs_are(interface, outputs, found, named):
    asked = Asked(None, [], dict.fromkeys(found if named else (), False))
    told = json.loads(encode(interface, asked, None, outputs)[0])["outputs"]
    assert {one["name"]: (one["datatype"], one.get("parameters"), one["data"]) for one in told} == found
    assert found.keys() == {one["name"] for one in interface.metadata("best", ["1"])["outputs"]}


@pytest.mark.parametrize(
    ("interface", "wanted", "said"),
    [
        (Interface.of([1]), ("odds",), "no output 'odds'; it has 'output'"),
        (IMAGES, (), "is a list, expected an object with the keys 'label' and 'odds'"),
        (IMAGES, ("label", "odds"), "is a list, expected an object with the keys 'label' and 'odds'"),
    ],
)
def test_an_answer_without_the_tensors_that_are_wanted_is_refused(interface, wanted, said):
    with pytest.raises(ServeError, match=said):
        encode(interface, Asked(None, [], dict.fromkeys(wanted, True)), None, [[1]])


# The public client.


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    "sent",
    [
        np.arange(8, dtype=dtype).reshape(2, 2, 2)
        for dtype in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
    ],
    ids=lambda array: str(array.dtype),
)
def test_tritonclient_sends_and_reads_numbers(sent, binary):
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import np_to_triton_dtype

    given = InferInput("input", list(sent.shape), np_to_triton_dtype(sent.dtype))
    given.set_data_from_numpy(sent, binary_data=binary)
    wanted = [InferRequestedOutput("odds", binary_data=binary)]
    body, size = InferenceServerClient.generate_request_body([given], outputs=wanted, request_id="7", timeout=5_000_000)
    asked = IMAGES.decode({} if size is None else {JSON_SIZE.lower(): str(size)}, body, MOST)
    assert (asked.inputs, asked.timeout_s) == (sent.tolist(), 5.0)
    outputs = [{"label": "one", "odds": [0.5, 0.25]}, {"label": "two", "odds": [1.0, 0.0]}]
    answer, headers = encode(IMAGES, asked, "1", outputs)
    found = InferenceServerClient.parse_response_body(answer, header_length=headers.get(JSON_SIZE))
    assert found.as_numpy("odds").tolist() == [[0.5, 0.25], [1.0, 0.0]]
    assert (found.get_response()["id"], found.get_output("label")) == ("7", None)


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_sends_and_reads_texts_and_truth_values(binary):
    from tritonclient.http import InferenceServerClient, InferInput

    interface = Interface.of([{"word": "a", "yes": True}], [["a"]])
    given = [InferInput("word", [2], "BYTES"), InferInput("yes", [2], "BOOL")]
    given[0].set_data_from_numpy(np.array(["é", ""], object), binary_data=binary)
    given[1].set_data_from_numpy(np.array([True, False]), binary_data=binary)
    body, size = InferenceServerClient.generate_request_body(given)
    asked = interface.decode({} if size is None else {JSON_SIZE.lower(): str(size)}, body, MOST)
    assert asked.inputs == [{"word": "é", "yes": True}, {"word": "", "yes": False}]
    answer, headers = encode(interface, asked, "1", [["a", "é"], ["", "b"]])
    found = InferenceServerClient.parse_response_body(answer, header_length=headers.get(JSON_SIZE))
    assert found.as_numpy("output").tolist() == [[b"a", "é".encode()], [b"", b"b"]]

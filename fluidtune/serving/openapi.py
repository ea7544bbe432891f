"""What a service answers over HTTP, as an OpenAPI 3.1 document.

Source: spec.openapis.org/oas/v3.1.0. The form of an input comes from the samples of its model, tensors from the types
of `inference_protocol`, the errors from `wire`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Struct

from fluidtune import __version__
from fluidtune.serving.inference_protocol import JSON_SIZE, InferenceRequest, InferenceResponse
from fluidtune.serving.loaded_model import Samples, as_json
from fluidtune.serving.wire import CODES, REQUEST_ID, TIMEOUT
from symphony_serve.errors import ServeError
from symphony_serve.forms import WHOLE, Form

#: The word of a form -> the type of JSON Schema.
_TYPES = {word: word for word in ("number", "null", "object")}
_TYPES |= {"text": "string", "truth value": "boolean", "list": "array"}


class Error(Struct):
    """An answer that is no output. A 503 has its text in reason, the others in error."""

    error: str
    code: Literal[tuple(CODES)]  # type: ignore[valid-type]
    reason: str | None = None


class State(Struct):
    """What the service does now."""

    state: str


#: The schemas of all services, by name: of the answers here, and of the types of the protocol.
_SCHEMAS = msgspec.json.schema_components(
    [Error, State, InferenceRequest, InferenceResponse], ref_template="#/components/schemas/{name}"
)[1]


def schema(form: Form) -> dict[str, Any]:
    """The JSON Schema of the values of this form."""
    types = sorted("integer" if word == "number" and form.number in WHOLE else _TYPES[word] for word in form.words)
    found: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    if form.items is not None:
        found["items"] = schema(form.items)
    if "list" in form.words and form.length is not None:
        found |= {"minItems": form.length, "maxItems": form.length}
    if "object" in form.words:
        inside = {key: schema(one) for key, one in form.keys.items()}
        found |= {"properties": inside, "required": list(inside), "additionalProperties": False}
    return found


def document(trials: Mapping[str, Samples], slo: float, token: bool) -> dict[str, Any]:
    """The document of a service. trials: the samples of each, by name, the best one first. slo: seconds.

    token: a bearer token is wanted.
    """
    schemas, unasked = dict(_SCHEMAS), (401,) if token else ()
    for number, (name, (inputs, outputs)) in enumerate(trials.items()):
        schemas[f"Input{number}"] = {"title": f"an input of trial {name}", **schema(Form.of(inputs))}
        output = schemas[f"Output{number}"] = {"title": f"an output of trial {name}"}
        with suppress(ServeError):  # Objects among them may have different keys, as only inputs must be alike.
            output |= schema(Form.of(outputs))
    get, post = partial(_get, unasked), partial(_post, unasked)
    asks = [
        post(
            f"the output of trial {name} for an input",
            {"application/json": {"schema": _ref("schemas", f"Input{number}"), "example": _plain(samples.inputs[0])}},
            {"application/json": {"schema": _ref("schemas", f"Output{number}")}},
        )
        for number, (name, samples) in enumerate(trials.items())
    ]
    state = {"application/json": {"schema": _ref("schemas", "State")}}
    paths: dict[str, Any] = {"/": {"get": get("what is served, and its state", content=state), "post": dict(asks[0])}}
    paths |= {f"/{quote(name, safe='')}": {"post": one} for name, one in zip(trials, asks, strict=True)}
    for live, ready in (("/healthz", "/readyz"), ("/v2/health/live", "/v2/health/ready")):
        # Whoever sends probes has no token.
        paths[live] = {"get": _get((), "whether the service lives") | {"security": []}}
        paths[ready] = {"get": _get((), "whether a model process can answer", 503) | {"security": []}}
    paths["/metrics"] = {"get": get("gauges and counters for Prometheus", content={"text/plain": {}})}
    paths["/v2"] = {"get": get("name, version and extensions of the server")}
    binary: dict[str, Any] = {"application/octet-stream": {}}
    tensors, answered = (
        {"application/json": {"schema": _ref("schemas", name)}} | binary
        for name in ("InferenceRequest", "InferenceResponse")
    )
    about = f"the outputs of a trial for a batch of inputs; with the header {JSON_SIZE} tensors are binary"
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        named: dict[str, Any] = {"parameters": [_parameter("path", "model", {"enum": list(trials)})]}
        if "version" in model:
            named["parameters"].append(_parameter("path", "version", {"type": "string"}))
        paths[model] = {"get": get("the tensors of a trial", 404), **named}
        paths[f"{model}/ready"] = {"get": get("whether a trial can answer", 404, 503), **named}
        paths[f"{model}/infer"] = {"post": post(about, tensors, answered, 404), **named}
    for path, one in paths.items():
        for method in one.keys() & {"get", "post"}:
            one[method]["operationId"] = f"{method} {path}"
    said = f"Each request is answered or refused within {slo:g} s, or within its own {TIMEOUT} if that is less."
    components: dict[str, Any] = {"schemas": schemas, "responses": _failures()}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "FluidTune", "version": __version__, "description": said},
        "paths": paths,
        "components": components,
    }
    if token:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


def _get(unasked: Sequence[int], about: str, *errors: int, content: Any = None) -> dict[str, Any]:
    """An operation. unasked: what each request may be answered with."""
    failures = {str(status): _ref("responses", f"Status{status}") for status in [*unasked, *errors]}
    answered = {"description": "answered", "content": content or {"application/json": {"schema": {}}}}
    return {"summary": about, "responses": {"200": answered, **failures}}


def _post(unasked: Sequence[int], about: str, body: Any, content: Any, *errors: int) -> dict[str, Any]:
    found = _get(unasked, about, 400, 413, 415, 500, 503, *errors, content=content)
    found["responses"]["200"]["headers"] = {REQUEST_ID: {"schema": {"type": "string"}}}
    parameters = [
        _parameter("header", TIMEOUT, {"type": "integer", "minimum": 1, "maximum": 9_999_999_999}),
        _parameter("header", REQUEST_ID, {"type": "string"}),
    ]
    return {**found, "parameters": parameters, "requestBody": {"required": True, "content": body}}


def _plain(value: Any) -> Any:
    """A sample as a JSON value."""
    return json.loads(json.dumps(value, default=as_json))


def _failures() -> dict[str, Any]:
    """By status, what is answered with it."""
    found: dict[str, Any] = {}
    for name, code in CODES.items():
        one = found.setdefault(f"Status{code.status}", {"description": ""})
        one["description"] += f"{name}: {code.meaning}\n"
        one["content"] = {"application/json": {"schema": _ref("schemas", "Error")}}
        if code.status == 503:
            seconds = {"type": "integer", "description": "seconds after which the request may be sent again"}
            one["headers"] = {"Retry-After": {"schema": seconds}}
    return found


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _parameter(where: str, name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"in": where, "name": name, "required": where == "path", "schema": values}

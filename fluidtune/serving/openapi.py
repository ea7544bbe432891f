"""What a service answers over HTTP, as an OpenAPI 3.1 document.

Source: spec.openapis.org/oas/v3.1.0. The form of an input comes from the samples of its model, tensors from the types
of `inference_protocol`, the errors from `wire`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    said = _Operations(trials, slo, token)
    paths: dict[str, Any] = {"/": {"get": said.get("what is served, and its state", "State"), "post": said.ask(0)}}
    paths |= {f"/{quote(name, safe='')}": {"post": said.ask(number)} for number, name in enumerate(trials)}
    for live, ready in (("/healthz", "/readyz"), ("/v2/health/live", "/v2/health/ready")):
        paths[live] = {"get": said.get("whether the service lives", probe=True)}
        paths[ready] = {"get": said.get("whether a model process can answer", errors=[503], probe=True)}
    counted = said.responses({"text/plain": {}}, [])
    paths["/metrics"] = {"get": {"summary": "gauges and counters for Prometheus", "responses": counted}}
    paths["/v2"] = {"get": said.get("name, version and extensions of the server")}
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        paths[model] = {"get": said.get("the tensors of a trial", errors=[404])}
        paths[f"{model}/ready"] = {"get": said.get("whether a trial can answer", errors=[404, 503])}
        paths[f"{model}/infer"] = {"post": said.infer()}
        named: list[Any] = [_parameter("path", "model", {"enum": list(trials)}, required=True)]
        if "version" in model:
            named.append(_parameter("path", "version", {"type": "string"}, required=True))
        for suffix in ("", "/ready", "/infer"):
            paths[model + suffix]["parameters"] = named
    for path, one in paths.items():
        for method, operation in one.items():
            if method != "parameters":
                operation["operationId"] = f"{method} {path}"
    components: dict[str, Any] = {"schemas": said.schemas, "responses": _failures()}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "FluidTune", "version": __version__, "description": said.about},
        "paths": paths,
        "components": components,
    }
    if token:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


class _Operations:
    """The operations of a service, as far as they differ by its trials."""

    def __init__(self, trials: Mapping[str, Samples], slo: float, token: bool):
        self._trials = list(trials.items())
        self._unasked = [401] if token else []
        self.about = (
            f"Each request is answered or refused within {slo:g} s, or within its own {TIMEOUT} if that is less."
        )
        self.schemas = dict(_SCHEMAS)
        for number, (name, (inputs, outputs)) in enumerate(self._trials):
            self.schemas[f"Input{number}"] = {"title": f"an input of trial {name}", **schema(Form.of(inputs))}
            output = self.schemas[f"Output{number}"] = {"title": f"an output of trial {name}"}
            with suppress(ServeError):  # Objects among them may have different keys, as only inputs must be alike.
                output |= schema(Form.of(outputs))

    def get(self, about: str, name: str = "", errors: Sequence[int] = (), probe: bool = False) -> dict[str, Any]:
        """probe: without a token, as whoever sends probes has none."""
        responses = self.responses({"application/json": {"schema": _ref("schemas", name) if name else {}}}, errors)
        if probe:
            responses.pop("401", None)
        return {"summary": about, "responses": responses} | ({"security": []} if probe else {})

    def ask(self, number: int) -> dict[str, Any]:
        name, samples = self._trials[number]
        sample = json.loads(json.dumps(samples.inputs[0], default=as_json))
        body = {"schema": _ref("schemas", f"Input{number}"), "example": sample}
        content = {"application/json": {"schema": _ref("schemas", f"Output{number}")}}
        about = f"the output of trial {name} for an input"
        return self._post(about, {"application/json": body}, content, [400, 413, 415, 500, 503])

    def infer(self) -> dict[str, Any]:
        about = f"the outputs of a trial for a batch of inputs; with the header {JSON_SIZE} tensors are binary"
        binary: dict[str, Any] = {"application/octet-stream": {}}
        asked = {"application/json": {"schema": _ref("schemas", "InferenceRequest")}}
        content = {"application/json": {"schema": _ref("schemas", "InferenceResponse")}}
        return self._post(about, asked | binary, content | binary, [400, 404, 413, 415, 500, 503])

    def _post(self, about: str, body: Any, content: Any, errors: Sequence[int]) -> dict[str, Any]:
        parameters = [
            _parameter("header", TIMEOUT, {"type": "integer", "minimum": 1, "maximum": 9_999_999_999}),
            _parameter("header", REQUEST_ID, {"type": "string"}),
        ]
        responses = self.responses(content, errors)
        responses["200"]["headers"] = {REQUEST_ID: {"schema": {"type": "string"}}}
        request = {"required": True, "content": body}
        return {"summary": about, "parameters": parameters, "requestBody": request, "responses": responses}

    def responses(self, content: Any, errors: Sequence[int]) -> dict[str, Any]:
        failures = {str(status): _ref("responses", f"Status{status}") for status in [*self._unasked, *errors]}
        return {"200": {"description": "answered", "content": content}, **failures}


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


def _parameter(where: str, name: str, values: dict[str, Any], required: bool = False) -> dict[str, Any]:
    return {"in": where, "name": name, "required": required, "schema": values}

"""What the front says over HTTP when it is not an output: a status, a code for programs, and a text for people.

Whatever is refused or wrong is raised as `Said`, wherever it is found out. `route` and `inference` are the tables of
paths and methods, `wire` that of the codes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

#: The paths besides "/" and those of the trials. Source: Kubernetes' names for whether a process lives, and whether it
#: can answer, and Prometheus' name for what it scrapes.
LIVE, READY, METRICS = "/healthz", "/readyz", "/metrics"
#: Where the OpenAPI document is. Source: the name that FastAPI has made usual.
DOCUMENT = "/openapi.json"
#: The paths at which no trial and no model answers by its name.
_OWN = ("/", LIVE, READY, METRICS, DOCUMENT)
#: Seconds between two attempts to begin, after which a client may ask again as well.
AGAIN_S = 5
#: The paths of the Open Inference Protocol.
_PROTOCOL = re.compile(
    r"/v2(?:/health/(?P<health>live|ready)"
    r"|/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/(?P<what>ready|infer))?)?/?"
)


@dataclass(frozen=True)
class Route:
    """What a path under /v2 asks for: "server", "live", "ready", or of a model "model", "model_ready", "infer"."""

    what: str
    model: str = ""
    #: "": the path names none.
    version: str = ""


class Said(Exception):
    """An answer other than an output.

    retry_s: whole seconds after which a client may ask again; a status 503 has them. closes: the connection ends behind
    it. headers: others.
    """

    def __init__(
        self,
        status: int,
        code: str,
        text: str,
        retry_s: int | None = None,
        closes: bool = False,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(text)
        self.status, self.code, self.text = status, code, text
        self.headers = dict(headers or {})
        if retry_s is not None:
            self.headers["Retry-After"] = str(retry_s)
        if closes:
            self.headers["Connection"] = "close"

    def response(self, in_protocol: bool = False) -> Response:
        """in_protocol: a client of the Open Inference Protocol asked, which shows only ``error``."""
        if self.status == 503 and not in_protocol:
            return as_json(503, {"error": "refused", "code": self.code, "reason": self.text}, self.headers)
        return as_json(self.status, {"error": self.text, "code": self.code}, self.headers)


def refused(code: str, text: str, retry_s: float | None = None, closes: bool = False) -> Said:
    """A 503. retry_s: seconds until there may be an answer, if it is a matter of load."""
    return Said(503, code, text, AGAIN_S if retry_s is None else max(1, math.ceil(retry_s)), closes)


def in_protocol(path: str) -> bool:
    """Whether it is a path of the Open Inference Protocol, or below one. /v2-ranker is that of a model."""
    return path == "/v2" or path.startswith("/v2/")


def is_taken(name: str) -> bool:
    """Whether the service itself answers at the path of this name, so that no model can."""
    return f"/{name}" in _OWN or in_protocol(f"/{name}")


def route(method: str, path: str, trials: Sequence[str]) -> str:
    """What is asked for: a path of this module, "/", or the name of a trial. Raises `Said` for what there is not."""
    name = path.strip("/")
    if path in _OWN:
        allowed: tuple[str, ...] = ("GET", "HEAD", "POST") if path == "/" else ("GET", "HEAD")
        asked = trials[0] if path == "/" and method == "POST" else path
    elif name in trials:
        allowed, asked = ("POST",), name
    else:
        raise Said(404, "not_found", f"no trial {name!r} is served; there are {', '.join(trials)}")
    if method not in allowed:
        raise not_served(method, path, "POST an input, or GET /", allowed)
    return asked


def inference(method: str, path: str, versions: Mapping[str, Sequence[str]]) -> Route:
    """What is asked for by the Open Inference Protocol. Raises `Said` for what there is not. versions: by model."""
    found = _PROTOCOL.fullmatch(path)
    if found is None:
        raise Said(404, "not_found", f"there is no {path}; GET /v2 or /v2/models/MODEL")
    what, model, version = found["what"] or "", found["model"] or "", found["version"] or ""
    if model and model not in versions:
        raise Said(404, "not_found", f"no model {model!r} is served; there are {', '.join(versions)}")
    if version and version not in versions[model]:
        there = ", ".join(versions[model])
        raise Said(404, "not_found", f"model {model!r} has no version {version!r}; there are {there}")
    allowed = ("POST",) if what == "infer" else ("GET", "HEAD")
    if method not in allowed:
        raise not_served(method, path, f"send {allowed[0]}", allowed)
    if not model:
        return Route(found["health"] or "server")
    return Route({"": "model", "ready": "model_ready", "infer": "infer"}[what], model, version)


def not_served(method: str, path: str, instead: str, allowed: Sequence[str]) -> Said:
    said = f"{method} {path} is not served; {instead}"
    return Said(405, "method_not_allowed", said, headers={"Allow": ", ".join(allowed)})


def as_json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    # Here, because the commands' side names paths by this module, also where `fluidtune[serve]` is not installed.
    from starlette.responses import Response

    return Response(json.dumps(value), status, headers, media_type="application/json")

"""What the front says over HTTP when it is not an output: a status, a code for programs, and a text for people.

Whatever is refused or wrong is raised as `HTTPError`, wherever it is found out. `route` knows the paths and methods,
`wire` has the table of the codes.
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

#: Seconds between two attempts to begin, after which a client may ask again as well.
AGAIN_S = 5
_MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
#: What is asked for -> its paths; any other path is a model's name. Each takes time in proportion to the path. Source:
#: Kubernetes' names for whether a process lives, and whether it can answer; Prometheus' name for what it scrapes; the
#: name of the OpenAPI document that FastAPI has made usual; the paths of the Open Inference Protocol.
_PATHS = {
    "about": re.compile("/"),
    "live": re.compile("/healthz|/v2/health/live/?"),
    "ready": re.compile("/readyz|/v2/health/ready/?"),
    "metrics": re.compile("/metrics"),
    "document": re.compile(r"/openapi\.json"),
    "server": re.compile("/v2/?"),
    "model": re.compile(f"{_MODEL}/?"),
    "model_ready": re.compile(f"{_MODEL}/ready/?"),
    "infer": re.compile(f"{_MODEL}/infer/?"),
}


@dataclass(frozen=True)
class Route:
    """What a method and a path ask for: "about" the service, to "ask" a model for an input, or another key of `_PATHS`.

    model, version: "" if the path names none.
    """

    what: str
    model: str = ""
    version: str = ""


class HTTPError(Exception):
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


def refused(code: str, text: str, retry_s: float | None = None, closes: bool = False) -> HTTPError:
    """A 503. retry_s: seconds until there may be an answer, if it is a matter of load."""
    return HTTPError(503, code, text, AGAIN_S if retry_s is None else max(1, math.ceil(retry_s)), closes)


def in_protocol(path: str) -> bool:
    """Whether it is a path of the Open Inference Protocol, or below one. /v2-ranker is that of a model."""
    return path == "/v2" or path.startswith("/v2/")


def is_taken(name: str) -> bool:
    """Whether the service itself answers at the path of this name, so that no model can."""
    return _asked(f"/{name}")[0] != "ask"


def is_probe(path: str) -> bool:
    """Whether it asks for the state alone, for which no token is wanted."""
    return _asked(path)[0] in ("live", "ready")


def _asked(path: str) -> tuple[str, dict[str, str]]:
    """The key of `_PATHS`, or "ask", and the model and the version that the path names."""
    found = ((what, pattern.fullmatch(path)) for what, pattern in _PATHS.items())
    named = ((what, match.groupdict("")) for what, match in found if match is not None)
    return next(named, ("ask", {"model": path.strip("/")}))


def route(method: str, path: str, versions: Mapping[str, Sequence[str]]) -> Route:
    """Raises `HTTPError` for what there is not. versions: of each model, the first one being that of ``POST /``."""
    what, named = _asked(path)
    if (method, what) == ("POST", "about"):
        return Route("ask", next(iter(versions)))
    asked = Route(what, **named)
    if "model" in named and asked.model not in versions:
        if what == "ask" and in_protocol(path):
            raise HTTPError(404, "not_found", f"there is no {path}; GET /v2 or /v2/models/MODEL")
        raise HTTPError(404, "not_found", f"no model {asked.model!r} is served; there are {', '.join(versions)}")
    if asked.version and asked.version not in versions[asked.model]:
        there = ", ".join(versions[asked.model])
        raise HTTPError(404, "not_found", f"model {asked.model!r} has no version {asked.version!r}; there are {there}")
    allowed = ["POST"] if what in ("ask", "infer") else ["GET", "HEAD"]
    if method not in allowed:
        allowed += ["POST"] if what == "about" else []
        said = f"{method} {path} is not served; send {' or '.join(allowed)}{', or GET /' * (what == 'ask')}"
        raise HTTPError(405, "method_not_allowed", said, headers={"Allow": ", ".join(allowed)})
    return asked


def as_json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    # Here, because the commands' side names paths by this module, also where `fluidtune[serve]` is not installed.
    from starlette.responses import Response

    return Response(json.dumps(value), status, headers, media_type="application/json")

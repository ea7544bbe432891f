"""What a service and its clients agree on besides JSON: the codes of its answers, and the headers of a request.

A code is for programs and stays what it is. The text beside it is for people.
"""

from __future__ import annotations

from typing import NamedTuple

from symphony_serve.errors import ServeError
from symphony_serve.messages import MAY_HAVE_RUN, Reason

#: Whole milliseconds in which the client wants the answer, from the moment at which the request has come. A duration,
#: so that the two clocks need not agree. HTTP defines no such header: this is the form of Connect's
#: ``Connect-Timeout-Ms`` (connectrpc.com/docs/protocol), named without a vendor and without "X-" (RFC 6648).
TIMEOUT = "Request-Timeout-Ms"
#: Given by the client, or made by the service; it is in the log and in the answer.
REQUEST_ID = "X-Request-ID"
#: Of an answer: the number of the version that has given it.
MODEL_VERSION = "Model-Version"
#: Where the times of a model's batches vary: names whom or what the request comes from. Requests of one source are
#: taken to need times of one distribution.
SOURCE = "Request-Source"


class Code(NamedTuple):
    """status: of HTTP. may_have_run: a model may have seen the input, so a client must not send it again by itself."""

    status: int
    meaning: str
    may_have_run: bool = False


#: The reasons of the scheduler that are told over HTTP.
_REASONS = [reason for reason in Reason if reason not in (Reason.CANCELLED, Reason.UNKNOWN_MODEL)]
CODES: dict[str, Code] = {
    "bad_input": Code(400, "the body is no JSON, or has another form than the samples; the text names the place"),
    "bad_request": Code(400, "the request is no HTTP/1.1, or has not one header Host"),
    "unauthorized": Code(401, "the bearer token is missing or wrong"),
    "not_found": Code(404, "there is no such trial, version or path"),
    "method_not_allowed": Code(405, "the path has another method, which the header Allow names"),
    "too_large": Code(413, "the body has too many bytes"),
    "content_encoding": Code(415, "the body is compressed; send it as it is"),
    "head_too_large": Code(431, "the head has too many bytes"),
    "model_failed": Code(500, "the model raised an error with this input", True),
    **{reason.name.lower(): Code(503, reason.value, reason in MAY_HAVE_RUN) for reason in _REASONS},
    "body_late": Code(503, "the body was not there and read at its deadline"),
    "too_many": Code(503, "too many inputs are open"),
    "too_many_connections": Code(503, "too many connections are open"),
    "too_many_bodies": Code(503, "too many bodies are being read"),
    "too_many_bytes": Code(503, "too many bytes of large bodies are held"),
    "loading": Code(503, "the models are being loaded"),
    "measuring": Code(503, "the models are being measured"),
    "failed": Code(503, "the models could not be loaded; the text says why"),
    "no_lease": Code(503, "the service has no device now"),
    "no_model_process": Code(503, "no model process can answer now"),
    "stopping": Code(503, "the service is being stopped"),
}


def timeout_s(given: str | None, most: float) -> float:
    """Seconds in which a request wants its answer. given: the header `TIMEOUT`. most: seconds of the SLO.

    Raises ServeError for a header that is no whole number.
    """
    if given is None:
        return most
    # Source of the ten digits: Connect's protocol. They are four months.
    if not (given.isascii() and given.isdecimal() and len(given) <= 10 and int(given)):
        raise ServeError(f"{TIMEOUT} is {given[:40]!r}, expected whole milliseconds, 1 or more")
    return min(most, int(given) / 1000)

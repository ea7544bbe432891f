"""How the front answers, without Ray: what it refuses unread, until when it waits, and when it is ready."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from symphony_serve.delays import Delays
from symphony_serve.forms import Form
from symphony_serve.profiles import Profile

pytestmark = pytest.mark.serve

#: Seconds. No test waits so long.
PATIENCE_S = 100.0


class Server:
    """Stands for an `AsyncServer`. Its answers come when the test gives them."""

    unanswered, closed = 9, False

    def __init__(self, able=1, hopeless=False):
        self.able, self._hopeless, self.answers, self.withins = able, hopeless, [], []

    def hopeless(self, name):
        return self._hopeless

    def wait(self, name):
        return 0.3

    def ask(self, name, value, within):
        self.withins.append(within)
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    async def close(self, timeout):
        self.closed = True
        for answer in self.answers:
            answer.set_result((200, "1"))


@pytest.fixture
def made():
    """Makes a front that serves trial "t", whose inputs are numbers."""
    from fluidtune.serving import front
    from fluidtune.serving.intake import Intake
    from fluidtune.serving.watching import Books

    def make(server=None, slo=0.5, count=1, waits=""):
        async def nothing():
            """Nothing was started."""

        one = object.__new__(front.Front)
        one._names, one._books, one._intake, one._state = ["t"], Books(["t"]), Intake(slo), "serving"
        one._server, one._stopping, one._watch, one._began = server, False, None, 0.0
        one._devices = SimpleNamespace(count=count, waits=waits, trouble="", close=nothing)
        one._setting = SimpleNamespace(slo=slo, loading=SimpleNamespace(trials=[]))
        one._models, one._forms, one._most, one._kept = {}, {"t": Form.of([1])}, {"t": 100}, ""
        one._log = SimpleNamespace(write=lambda event, **fields: None, close=lambda: None)
        return one

    return make


async def ask(front, method="POST", path="/", body=b"1", half=False, read=None, gone=None):
    """The status, the value and the headers of an answer. gone: an event; the client hangs up when it is set."""
    asked, sent = [], []

    async def receive():
        if asked:
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        asked.append(True)
        assert read is not None or body is not None, "nothing is to be read"
        if read is not None:
            read.append(True)
        return {"type": "http.request", "body": body, "more_body": half}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "server": ("h", 80)}
    await front(scope, receive, send)
    start, *rest = sent
    headers = {name.decode().title(): value.decode() for name, value in start["headers"]}
    text = b"".join(one.get("body", b"") for one in rest)
    return start["status"], json.loads(text) if text else None, headers


def answered(front, **given):
    return asyncio.run(ask(front, **given))


def test_without_a_lease_requests_are_refused_at_once(made):
    front = made(Server(), count=0, waits="waiting for a lease of a GPU")
    status, said, headers = answered(front, body=None)
    reason = "the service has no device now: waiting for a lease of a GPU"
    assert (status, said) == (503, {"error": "refused", "code": "no_lease", "reason": reason})
    assert headers["Retry-After"] == "5"
    assert front._books.requests("t") == {"refused: no_lease": 1}
    front._devices.trouble = "another app of that name"
    assert front.trouble == "another app of that name"


def test_more_open_requests_than_the_limit_are_refused_unread(made):
    from fluidtune.serving import intake

    front = made(Server())
    front._intake.open = intake.MOST_OPEN
    status, said, _ = answered(front, body=None)
    assert (status, said["code"], said["reason"]) == (503, "too_many", "10000 requests are open already")
    assert front._books.requests("t") == {"refused: too_many": 1}
    assert front._intake.open == intake.MOST_OPEN


def test_what_is_hopeless_is_refused_unread(made):
    front, read = made(Server(hopeless=True)), []
    status, said, headers = answered(front, read=read)
    refused = {"error": "refused", "code": "queue_full", "reason": "too many requests wait before it"}
    assert (status, said, read, headers["Retry-After"]) == (503, refused, [], "1")
    assert front._books.requests("t") == {"refused: queue_full": 1}


def test_a_client_that_hangs_up_takes_its_request_out_of_the_queue(made):
    front = made(Server(), slo=PATIENCE_S)

    async def run():
        gone = asyncio.Event()
        asked = asyncio.ensure_future(ask(front, gone=gone))
        while not front._server.answers:
            await asyncio.sleep(0)
        gone.set()
        return await asked

    assert asyncio.run(run())[0] == 400
    assert front._server.answers[0].cancelled()
    assert front._books.requests("t") == {"cancelled": 1}


def test_an_answer_that_does_not_come_is_refused_at_the_slo_and_its_request_is_cancelled(made):
    front = made(Server(), slo=0.01)
    status, said, headers = answered(front)
    assert (status, said["code"], headers["Retry-After"]) == (503, "overdue", "1")
    assert front._server.answers[0].cancelled()
    assert front._books.requests("t") == {"late": 1}


def test_a_body_that_does_not_come_is_refused_at_the_slo(made):
    front = made(Server(), slo=0.01)
    status, said, headers = answered(front, body=b"1", half=True)
    assert (status, said["code"], headers["Connection"]) == (503, "body_late", "close")
    assert front._books.requests("t") == {"refused: body_late": 1}
    assert front._intake.open == 0


def test_what_was_spent_before_counts_against_the_slo(made, monkeypatch):
    """The body takes a second of the ten, so that nine are left for the model."""
    from fluidtune.serving import front as fronts

    front, begin = made(Server(), slo=10.0), time.monotonic()
    now = [begin]
    monkeypatch.setattr(fronts.time, "monotonic", lambda: now[0])
    read = front._intake.read

    async def slowly(*given):
        value = await read(*given)
        now[0] = begin + 1.0
        return value

    front._intake.read = slowly

    async def run():
        asked = asyncio.ensure_future(ask(front))
        while not front._server.answers:
            await asyncio.sleep(0)
        front._server.answers[0].set_result((200, "1"))
        return await asked

    assert asyncio.run(run())[0] == 200
    assert front._server.withins == pytest.approx([9.0])


def test_ready_is_whoever_has_a_model_process_that_can_answer(made):
    front = made(Server(able=1))
    assert answered(front, method="GET", path="/readyz", body=None)[:2] == (200, {"state": "serving"})
    front._server.able = 0
    status, said, headers = answered(front, method="GET", path="/readyz", body=None)
    assert (status, said["code"], headers["Retry-After"]) == (503, "no_model_process", "5")
    waits = {"state": "waiting for a model process"}
    assert answered(front, method="GET", path="/healthz", body=None)[:2] == (200, waits)
    assert answered(front, method="HEAD", path="/", body=None)[1]["state"] == waits["state"]
    front._devices.count = 0
    assert answered(front, method="GET", path="/readyz", body=None)[1]["code"] == "no_lease"
    front._server = None
    assert answered(front, method="GET", path="/readyz", body=None)[0] == 503


def test_a_stopped_front_answers_what_runs_and_refuses_what_comes(made):
    front = made(Server(), slo=PATIENCE_S)

    async def run():
        runs = asyncio.ensure_future(ask(front))
        while not front._server.answers:
            await asyncio.sleep(0)
        front._beginning = asyncio.ensure_future(asyncio.sleep(0))
        await front.stop()
        assert front._intake.open == 0
        return await runs, await ask(front, body=None), await ask(front, method="GET", path="/readyz", body=None)

    ran, came, ready = asyncio.run(run())
    assert ran[:2] == (200, 1)
    assert (came[0], came[1]["code"], came[2]["Connection"]) == (503, "stopping", "close")
    assert ready[0] == 503
    assert front.trouble == ""


@pytest.mark.parametrize(
    ("sent", "code"), [({"body": b"[1]"}, "bad_input"), ({"body": b" " * 101 + b"1"}, "too_large")]
)
def test_what_is_wrong_is_counted_and_told_with_a_code(made, sent, code):
    front = made(Server())
    assert answered(front, **sent)[1]["code"] == code
    assert front._books.requests("t") == {"bad": 1}


def test_of_an_overload_no_times_are_kept(made):
    """Else `fluidtune serve plan` says that no SLO is long enough. docs/bugs.md, 374."""
    front, kept = made(Server()), []
    front._log = SimpleNamespace(keep=lambda name, text: kept.append(json.loads(text)))
    front._models = {"t": SimpleNamespace(delays=Delays(jitter=0.01))}
    front._server.profile = lambda name: Profile.linear(0.0, 0.2, 1)
    front._note()
    front._server.profile = lambda name: Profile.linear(0.0, 5.0, 1)
    front._keep_profiles()
    front._note()
    front._keep_profiles()
    assert [one["seconds"] for one in kept] == [{"t": [0.2]}] * 2


def test_metrics_are_in_the_text_format_of_prometheus(made):
    from prometheus_client.parser import text_string_to_metric_families

    front, sent = made(Server(hopeless=True)), []
    answered(front)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
    asyncio.run(front(scope, None, send))
    found = {one.name: one for one in text_string_to_metric_families(sent[1]["body"].decode())}
    (sample,) = found["fluidtune_serve_requests"].samples
    assert (sample.labels, sample.value) == ({"trial": "t", "outcome": "refused: queue_full"}, 1.0)

"""How the front answers, without Ray: what it refuses unread, until when it waits, and when it is ready."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
import time
from types import SimpleNamespace

import pytest

from symphony_serve.delays import Delays
from symphony_serve.errors import Refused
from symphony_serve.messages import Reason
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile

pytestmark = pytest.mark.serve

#: Seconds. No test waits so long.
PATIENCE_S = 100.0


class Waits(asyncio.Future):
    """Stands for an `Answer`."""

    sent = False


class Server:
    """Stands for an `AsyncServer`. Its answers come when the test gives them."""

    unanswered, closed = 9, False

    def __init__(self, able=1, hopeless=None, most=math.inf):
        """most: more requests than these are hopeless."""
        self.able, self._hopeless, self._most, self.answers, self.withins = able, hopeless, most, [], []

    def hopeless(self, name, within, count=1):
        if within < 0:
            return Reason.LATE_ON_ARRIVAL
        return self._hopeless if count <= self._most else Reason.QUEUE_FULL

    def wait(self, name):
        return 0.3

    def able_for(self, name):
        return self.able > 0

    def ask(self, name, value, within, source=""):
        self.withins.append(within)
        self.answers.append(Waits())
        return self.answers[-1]

    async def close(self, timeout=None):
        self.closed = True
        for answer in self.answers:
            answer.set_result((200, "1"))


@pytest.fixture
def made():
    """Makes a front that serves trial "t", whose inputs are numbers."""
    from fluidtune.serving import front
    from fluidtune.serving.intake import Intake
    from fluidtune.serving.loaded_model import Samples
    from fluidtune.serving.model_versions import Service, Version
    from fluidtune.serving.rollouts import Answering
    from fluidtune.serving.watching import Books

    def make(server=None, slo=0.5, count=1, waits="", token=None):
        async def nothing():
            """Nothing was started."""

        one = object.__new__(front.Front)
        one._names, one._books, one._intake, one._state = ["t"], Books(["t"]), Intake(slo), "serving"
        one._server, one._stopping, one._watch, one._began, one._following = server, False, None, 0.0, None
        one._devices = SimpleNamespace(count=count, waits=waits, trouble="", close=nothing)
        one._setting = SimpleNamespace(
            slo=slo, loading=SimpleNamespace(trials=[]), token=token, placing=None, slo_of=lambda name: slo
        )
        model = Model("t", Profile.linear(0.0, 1e-9, 1), 1.0, delays=Delays(jitter=0.01))
        service = Service(Version(1, "t", "run", state="serving"))
        answering = Answering.of(model, Samples([1], [2]), 100)
        about = {"service": service, "answering": {"t": answering}, "keys": ["t"], "close": nothing}
        one.rollouts, one._document, one._kept = SimpleNamespace(**about), {}, ""
        one._log = SimpleNamespace(write=lambda event, **fields: None, close=lambda: None)
        return one

    return make


async def ask(front, method="POST", path="/", body=b"1", half=False, read=None, gone=None, headers=(), takes=0.0):
    """The status, the value and the headers of an answer.

    gone: an event; the client hangs up when it is set. takes: seconds after which the body is there.
    """
    asked, sent = [], []

    async def receive():
        if asked:
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        asked.append(True)
        assert read is not None or body is not None, "nothing is to be read"
        if read is not None:
            read.append(True)
        if takes:
            await asyncio.sleep(takes)
        return {"type": "http.request", "body": body, "more_body": half}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
    await front(scope, receive, send)
    start, *rest = sent
    said = {name.decode().title(): value.decode() for name, value in start["headers"]}
    text = b"".join(one.get("body", b"") for one in rest)
    return start["status"], json.loads(text) if text else None, said


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
    assert (status, said["code"], said["reason"]) == (503, "too_many", "10000 inputs are open already")
    assert front._books.requests("t") == {"refused: too_many": 1}
    assert front._intake.open == intake.MOST_OPEN


def test_what_is_hopeless_is_refused_unread(made):
    front, read = made(Server(hopeless=Reason.QUEUE_FULL)), []
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


def test_ready_is_whoever_has_a_model_process_that_can_answer(made):
    front = made(Server(able=1))
    assert answered(front, method="GET", path="/readyz", body=None)[:2] == (200, {"ready": True, "state": "serving"})
    front._server.able = 0
    status, said, headers = answered(front, method="GET", path="/readyz", body=None)
    assert (status, said["code"], headers["Retry-After"]) == (503, "no_model_process", "5")
    waits = {"live": True, "state": "waiting for a model process"}
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
    """Seen: after an overload, `fluidtune serve plan` said "give an SLO of at least 5.63 s"."""
    front, kept = made(Server()), []
    front._log = SimpleNamespace(keep=lambda name, text: kept.append(json.loads(text)))
    front._server.profile = lambda name: Profile.linear(0.0, 0.2, 1)
    front._note()
    front._server.profile = lambda name: Profile.linear(0.0, 5.0, 1)
    front._keep_profiles()
    front._note()
    front._keep_profiles()
    assert [one["seconds"] for one in kept] == [{"t": [0.2]}] * 2


def test_metrics_are_in_the_text_format_of_prometheus(made):
    from prometheus_client.parser import text_string_to_metric_families

    front, sent = made(Server(hopeless=Reason.QUEUE_FULL)), []
    answered(front)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
    asyncio.run(front(scope, None, send))
    found = {one.name: one for one in text_string_to_metric_families(sent[1]["body"].decode())}
    (sample,) = found["fluidtune_serve_requests"].samples
    assert (sample.labels, sample.value) == ({"trial": "t", "version": "1", "outcome": "refused: queue_full"}, 1.0)


async def answering(front, count, answers, **given):
    """The answer to a request, when the model has given ``answers`` to the first of its ``count`` inputs."""
    asked = asyncio.ensure_future(ask(front, **given))
    while len(front._server.answers) < count:
        await asyncio.sleep(0)
    for answer, told in zip(front._server.answers, answers, strict=False):
        answer.set_exception(told) if isinstance(told, Exception) else answer.set_result(told)
    return await asked


def test_a_request_names_itself_and_its_own_deadline(made):
    front = made(Server(), slo=PATIENCE_S)
    headers = [(b"x-request-id", b"mine"), (b"request-timeout-ms", b"20000")]
    status, value, said = asyncio.run(answering(front, 1, [(200, "2")], headers=headers))
    assert (status, value, said["X-Request-Id"]) == (200, 2, "mine")
    assert 0 < front._server.withins[0] < 20, "what was spent before counts"
    assert len(answered(front, method="GET", path="/healthz")[2]["X-Request-Id"]) == 32
    status, said, _ = answered(front, headers=[(b"request-timeout-ms", b"soon")])
    assert status == 400 and "Request-Timeout-Ms is 'soon'" in said["error"]


@pytest.mark.parametrize(("timeout", "hurried"), [(b"10", 1), (b"600000", 0)])
@pytest.mark.parametrize("hopeless", [None, Reason.QUEUE_FULL])
def test_what_a_client_wants_sooner_than_the_slo_is_counted_as_hurried(made, hopeless, timeout, hurried):
    front = made(Server(hopeless=hopeless), slo=0.02)
    assert answered(front, headers=[(b"request-timeout-ms", timeout)])[0] == 503
    total = front._books.total()
    assert (total.requests["t"].total(), total.hurried["t"].total()) == (1, hurried)


TENSOR = json.dumps({"inputs": [{"name": "input", "shape": [1], "datatype": "INT64", "data": [1]}]}).encode()


@pytest.mark.parametrize("given", [{}, {"path": "/v2/models/t/infer", "body": TENSOR}])
@pytest.mark.parametrize(("takes", "slow"), [(0.0, 0), (0.3, 1)])
def test_what_a_client_took_to_send_its_body_is_no_load(made, given, takes, slow):
    """Seen: clients that send their bodies slowly made a service on leases ask for more devices."""
    front = made(Server(), slo=0.5)
    assert answered(front, takes=takes, **given)[1]["error"]
    total = front._books.total()
    assert (total.requests["t"], total.hurried["t"].total()) == ({"late": 1}, slow)


def test_whoever_has_not_the_token_is_told_so_and_probes_need_none(made):
    front = made(Server(), token="secret-token", slo=0.01)
    status, said, headers = answered(front, body=None)
    assert (status, said["code"], headers["Www-Authenticate"]) == (401, "unauthorized", "Bearer")
    assert answered(front, body=None, headers=[(b"authorization", "Bearer sécret".encode("latin-1"))])[0] == 401
    assert answered(front, method="GET", path="/metrics", body=None)[0] == 401
    assert answered(front, method="GET", path="/healthz", body=None)[0] == 200
    assert answered(front, headers=[(b"authorization", b"Bearer secret-token")])[1]["code"] == "overdue"


def test_a_batch_of_tensors_is_answered_whole_or_refused(made):
    front = made(Server(), slo=PATIENCE_S)
    body = json.dumps({"inputs": [{"name": "input", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}).encode()
    given = {"path": "/v2/models/t/infer", "body": body}
    status, value, _ = asyncio.run(answering(front, 2, [(200, "2"), (200, "4")], **given))
    assert (status, value["outputs"][0]["data"], value["model_version"]) == (200, [2, 4], "1")
    front._server.answers.clear()
    refused = Refused("t", Reason.LATE)
    status, value, _ = asyncio.run(answering(front, 2, [refused], **given))
    assert (status, value) == (503, {"error": Reason.LATE.value, "code": "late"})
    assert front._server.answers[1].cancelled()
    assert front._books.requests("t") == {"answered": 2, "refused: late": 2}
    assert answered(front, path="/v2/models/u/infer")[0] == 404
    assert answered(front, path="/v2/models/t/infer", body=b"{}")[1]["code"] == "bad_input"


SIZES = (b"999999", b"9" * 5000)


@pytest.mark.parametrize("headers", [[], *([(b"inference-header-content-length", size)] for size in SIZES)])
def test_json_with_tensors_is_bounded_because_it_is_read_in_one_go(made, headers):
    front = made(Server(), slo=PATIENCE_S)
    front.rollouts.answering["t"] = dataclasses.replace(front.rollouts.answering["t"], most=1 << 20)
    status, said, _ = answered(front, path="/v2/models/t/infer", body=b" " * (257 << 10), headers=headers)
    assert (status, said["code"]) == (413, "too_large") and "send binary tensors" in said["error"]


@pytest.mark.parametrize("name", ["v2-ranker", "v2.1", "v20"])
def test_a_model_whose_name_only_begins_like_the_protocol_answers(made, name):
    """Seen: a model named `v2-ranker` was served, and each request to it got 404."""
    front = made(Server(), slo=0.01)
    front._names.append(name)
    front._books.add(name)
    front.rollouts.answering[name] = front.rollouts.answering["t"]
    assert answered(front, path=f"/{name}")[1]["code"] == "overdue"
    assert answered(front, path=f"/{name}x")[1]["code"] == "not_found"


@pytest.mark.parametrize("where", ["forks", "restore", "load", "anew", "interrupted"])
def test_what_fails_at_the_start_is_said_and_tried_again(made, monkeypatch, caplog, where):
    """Seen: with a full /tmp, `serve start` waited for ever in the state "loading", with no word in any log."""
    from fluidtune.serving import front as fronts

    front, seen = made(), []
    failing = {where, "load"} if where in ("anew", "interrupted") else {where}

    def fails(name):
        if name in failing:
            failing.remove(name)
            raise OSError(f"{name} fails")

    async def restore():
        fails("restore")

    async def load():
        fails("load")

    async def sleep(seconds):
        assert seconds == fronts.AGAIN_S
        seen.append((front._state, front._why))

    async def interrupted():
        fails("interrupted")
        return False

    front._setting.modules, front._setting.loading.environment, front._forks = ("numpy",), {}, None
    front._devices.anew, front._devices.interrupted = lambda: fails("anew"), interrupted
    front.rollouts.restore, front._load_and_measure = restore, load
    monkeypatch.setattr(fronts, "ForkedActors", lambda *given: fails("forks") or "forks")
    monkeypatch.setattr(fronts, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    asyncio.run(front._begin())
    assert seen[0] == ("failed", repr(OSError(f"{where} fails")))
    assert (front._forks, failing) == ("forks", set())
    assert f"{where} fails" in caplog.text


@pytest.fixture
def many(made):
    """A front with a long SLO, which takes bodies of many inputs."""
    front = made(Server(), slo=PATIENCE_S)
    front.rollouts.answering["t"] = dataclasses.replace(front.rollouts.answering["t"], most=1 << 20)
    return front


def tensor(count):
    """A request with so many inputs."""
    one = {"name": "input", "shape": [count], "datatype": "INT64", "data": [1] * count}
    return {"path": "/v2/models/t/infer", "body": json.dumps({"inputs": [one]}).encode()}


@pytest.mark.parametrize(("late", "code"), [(False, "queue_full"), (True, "late_on_arrival")])
def test_inputs_that_are_hopeless_together_are_not_even_asked_for(made, late, code):
    """late: decoding them takes until after the deadline."""
    front = made(Server(most=20), slo=PATIENCE_S)
    decoded = front._decoded

    async def slowly(about, request, body, until):
        batch, until = await decoded(about, request, body, until)
        return batch, time.monotonic() - 1.0 if late else until

    front._decoded = slowly
    status, said, _ = answered(front, **tensor(20 if late else 21))
    assert (status, said["code"], front._server.answers) == (503, code, [])
    assert front._books.requests("t") == {f"refused: {code}": 20 if late else 21}
    assert front._intake.open == 0


def test_in_a_turn_of_the_loop_a_piece_of_all_inputs_is_asked_for(many):
    """Seen: requests of 1,024 inputs held the front's loop, so that `/healthz` did not answer for seconds."""
    from fluidtune.serving.front import ASKED

    front, counts = many, [3, 1000, 500, *[2] * 100]

    async def run():
        asked, turns, before = [asyncio.ensure_future(ask(front, **tensor(count))) for count in counts], [], 0
        while before < sum(counts) and not any(one.done() for one in asked):
            await asyncio.sleep(0)
            turns.append(len(front._server.answers) - before)
            before += turns[-1]
        assert front._intake.open == sum(counts)
        for answer in front._server.answers:
            answer.set_result((200, "1"))
        return [await one for one in asked], turns

    told, turns = asyncio.run(run())
    assert [len(value["outputs"][0]["data"]) for _, value, _ in told] == counts
    assert max(turns) < 2 * ASKED
    assert front._books.requests("t") == {"answered": sum(counts)}
    assert front._intake.open == 0


@pytest.mark.parametrize("gone", [True, False])
def test_the_rest_of_the_inputs_is_not_asked_for_when_it_is_of_no_use(many, gone):
    """The client has gone, or one of the first inputs was refused."""
    from fluidtune.serving.front import ASKED

    front = many

    async def run():
        left = asyncio.Event()
        asked = asyncio.ensure_future(ask(front, gone=left, **tensor(1024)))
        while not front._server.answers:
            await asyncio.sleep(0)
        if gone:
            left.set()
        else:
            front._server.answers[0].set_exception(Refused("t", Reason.LATE))
        return await asked

    status, said, _ = asyncio.run(run())
    assert (status, said["code"]) == ((400, "disconnected") if gone else (503, "late"))
    assert front._books.requests("t") == {"cancelled" if gone else "refused: late": 1024}
    assert len(front._server.answers) <= 4 * ASKED
    assert all(answer.cancelled() for answer in front._server.answers[1:])


@pytest.mark.parametrize("gone", [True, False])
def test_in_a_turn_of_the_loop_a_piece_of_all_inputs_is_cancelled(many, gone):
    """The client has gone, or one input was refused."""
    from fluidtune.serving.front import ASKED

    front, turns = many, []

    async def run():
        left = asyncio.Event()
        asked = asyncio.ensure_future(ask(front, gone=left, **tensor(1024)))
        while len(front._server.answers) < 1024:
            await asyncio.sleep(0)
        if gone:
            left.set()
        else:
            front._server.answers[0].set_exception(Refused("t", Reason.LATE))
        before = 0
        while not asked.done():
            await asyncio.sleep(0)
            turns.append(sum(one.cancelled() for one in front._server.answers) - before)
            before += turns[-1]
        return await asked

    status, said, _ = asyncio.run(run())
    assert (status, said["code"]) == ((400, "disconnected") if gone else (503, "late"))
    assert sum(turns) == 1024 - (not gone)
    assert max(turns) <= 2 * ASKED


def test_a_request_that_is_cut_off_cancels_all_its_inputs(many):
    async def run():
        left = asyncio.Event()
        asked = asyncio.ensure_future(ask(many, gone=left, **tensor(1024)))
        while len(many._server.answers) < 1024:
            await asyncio.sleep(0)
        left.set()
        while not any(one.cancelled() for one in many._server.answers):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(run())
    assert all(one.cancelled() for one in many._server.answers)


@pytest.mark.parametrize(("sent", "code", "counted"), [(False, "late", "refused: late"), (True, "overdue", "late")])
def test_inputs_of_which_some_are_not_asked_for_in_time_are_late(many, sent, code, counted):
    """And overdue, if a model may have seen one: then a client must not ask again by itself."""
    front = many

    async def run():
        asking = front._ask_many

        async def stops(*given):
            await asyncio.wait_for(asking(*given[:2], given[2][:1], *given[3:]), PATIENCE_S)
            front._server.answers[0].sent = sent
            await asyncio.Event().wait()

        front._ask_many = stops
        return await ask(front, **tensor(2), headers=[(b"request-timeout-ms", b"200")])

    status, said, _ = asyncio.run(run())
    assert (status, said["code"]) == (503, code)
    assert front._books.requests("t") == {counted: 2}


def test_a_few_inputs_do_not_wait_behind_large_bodies(many):
    """Seen: batches of others were late."""

    async def run():
        async def uploads():
            while True:
                async with many._intake._bodies.one():
                    pass

        bodies = [asyncio.ensure_future(uploads()) for _ in range(1000)]
        await asyncio.sleep(0)
        asked, turns = asyncio.ensure_future(ask(many, **tensor(2))), 0
        while not many._server.answers:
            await asyncio.sleep(0)
            turns += 1
        for answer in many._server.answers:
            answer.set_result((200, "1"))
        for one in bodies:
            one.cancel()
        await asyncio.wait(bodies)
        assert (await asked)[0] == 200
        return turns

    assert asyncio.run(run()) < 20


def test_the_inputs_of_a_request_are_open_each(made, monkeypatch):
    """Seen: a request of 1,024 inputs counted as one of the 10,000 that may be open."""
    from fluidtune.serving import intake

    monkeypatch.setattr(intake, "MOST_OPEN", 10)
    front = made(Server(), slo=PATIENCE_S)

    async def run():
        first = asyncio.ensure_future(ask(front, **tensor(8)))
        while len(front._server.answers) < 8:
            await asyncio.sleep(0)
        refused = await ask(front, **tensor(3))
        assert front._intake.open == 8
        for answer in front._server.answers:
            answer.set_result((200, "1"))
        return refused, await first

    refused, first = asyncio.run(run())
    assert (refused[0], refused[1]["code"], first[0]) == (503, "too_many", 200)
    assert front._books.requests("t") == {"answered": 8, "refused: too_many": 3}
    assert front._intake.open == 0


def test_an_output_that_is_no_tensor_of_the_metadata_is_one_failure_of_the_model(made):
    """Seen: the client got 400 after the model had run, and the request counted as answered and as bad."""
    from fluidtune.serving.inference_protocol import Interface

    front = made(Server(), slo=PATIENCE_S)
    keyed = Interface.of([1], [{"cat": 0.9}])
    front.rollouts.answering["t"] = dataclasses.replace(front.rollouts.answering["t"], interface=keyed)
    status, said, _ = asyncio.run(answering(front, 2, [(200, '{"cat": 1}'), (200, "5")], **tensor(2)))
    assert (status, said["code"]) == (500, "model_failed")
    assert "is a int, expected an object with the keys 'cat'" in said["error"]
    assert front._books.requests("t") == {"failed": 2}


def test_an_output_that_another_version_has_not_is_refused_before_it_is_asked(made):
    """The version that reads the request is not the one that is there when it is read."""
    from fluidtune.serving.inference_protocol import Interface

    front = made(Server(), slo=PATIENCE_S)
    decoded, about = front._decoded, front.rollouts.answering["t"]
    front.rollouts.answering["t"] = dataclasses.replace(about, interface=Interface.of([1], [{"cat": 0.9}]))

    async def changes(*given):
        front.rollouts.answering["t"] = about
        return await decoded(*given)

    front._decoded = changes
    one = {"name": "input", "shape": [1], "datatype": "INT64", "data": [1]}
    body = json.dumps({"inputs": [one], "outputs": [{"name": "cat"}]}).encode()
    status, said, _ = answered(front, path="/v2/models/t/infer", body=body)
    assert (status, said["error"]) == (400, "the model has no output 'cat'; it has 'output'")
    assert (front._server.answers, front._books.requests("t")) == ([], {"bad": 1})


def test_a_large_answer_is_encoded_beside_the_loop(made, monkeypatch):
    """Seen: a client that asked for large outputs held the front's loop for a tenth of a second each time."""
    from fluidtune.serving.inference_protocol import Interface

    threads, encode = [], Interface.encode

    def noted(*given):
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*given)

    monkeypatch.setattr(Interface, "encode", noted)
    for output in ("2", json.dumps([0.5] * 10_000)):
        status, _, _ = asyncio.run(answering(made(Server(), slo=PATIENCE_S), 1, [(200, output)], **tensor(1)))
        assert status == 200
    assert threads == [True, False]


def test_a_single_large_output_is_read_in_pieces(made, monkeypatch):
    """One call of `json` would hold the loop, though it is in another thread."""
    from symphony_serve import reading

    pieces, output = [], [0.5] * 100_000

    class Counted(reading.Reading):
        def add(self, piece):
            pieces.append(len(piece))
            super().add(piece)

    monkeypatch.setattr(reading, "Reading", Counted)
    text = json.dumps(output)
    status, value, _ = asyncio.run(answering(made(Server(), slo=PATIENCE_S), 1, [(200, text)], **tensor(1)))
    assert (status, value["outputs"][0]["data"]) == (200, output)
    assert (sum(pieces), max(pieces)) == (len(text), reading.PIECE)

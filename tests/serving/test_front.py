"""How the front answers, without Ray: what it refuses unread, until when it waits, and when it is ready."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fluidtune.serving.front import ASKED
from fluidtune.serving.inference_protocol import Interface
from fluidtune.serving.intake import MOST_OPEN
from symphony_serve.errors import Refused
from symphony_serve.messages import Reason
from tests.serve.driving import PATIENCE_S
from tests.serving.fronts import Server, answering, ask, begun, made

pytestmark = pytest.mark.serve


@pytest.fixture
def many():
    """A front with a long SLO."""
    return made(slo=PATIENCE_S)


@pytest.mark.parametrize(
    ("count", "hopeless", "unavailable", "code", "reason", "after"),
    [
        (0, None, {}, "no_lease", "the service has no device now: waiting for a lease of a GPU", "5"),
        (1, Reason.QUEUE_FULL, {}, "queue_full", "too many requests wait before it", "1"),
        (1, None, {"t": "its files differ"}, "no_model_process", "model t is not loaded: its files differ", "5"),
    ],
)
async def test_what_cannot_be_answered_in_time_is_refused_unread(count, hopeless, unavailable, code, reason, after):
    front = made(Server(hopeless=hopeless), count=count, waits="waiting for a lease of a GPU")
    front.placed = SimpleNamespace(unavailable=unavailable, comes_in=lambda key: None)
    status, said, headers = await ask(front, body=None)
    assert (status, said) == (503, {"error": "refused", "code": code, "reason": reason})
    assert headers["Retry-After"] == after
    assert front.books.requests("t") == {f"refused: {code}": 1}


async def test_an_answer_that_does_not_come_is_refused_at_the_slo_and_its_request_is_cancelled():
    front = made(slo=0.01)
    status, said, headers = await ask(front)
    assert (status, said["code"], headers["Retry-After"]) == (503, "overdue", "1")
    assert front.server.answers[0].cancelled()
    assert front.books.requests("t") == {"late": 1}


async def test_ready_is_whoever_has_a_model_process_that_can_answer():
    front = made()
    assert (await ask(front, method="GET", path="/readyz", body=None))[:2] == (200, {"ready": True, "state": "serving"})
    front.server.able = 0
    status, said, headers = await ask(front, method="GET", path="/readyz", body=None)
    assert (status, said["code"], headers["Retry-After"]) == (503, "no_model_process", "5")
    waits = {"live": True, "state": "waiting for a model process"}
    assert (await ask(front, method="GET", path="/healthz", body=None))[:2] == (200, waits)
    assert (await ask(front, method="HEAD", path="/", body=None))[1]["state"] == waits["state"]
    type(front.devices).count = 0
    assert (await ask(front, method="GET", path="/readyz", body=None))[1]["code"] == "no_lease"
    front.server = None
    assert (await ask(front, method="GET", path="/readyz", body=None))[0] == 503


async def test_while_the_service_stops_requests_are_refused_and_it_is_not_ready():
    front = made()
    front.stopping = True
    (status, said, headers), ready = await ask(front, body=None), await ask(front, method="GET", path="/readyz")
    assert (status, said["code"], headers["Connection"], ready[0]) == (503, "stopping", "close", 503)


async def test_metrics_are_in_the_text_format_of_prometheus():
    front = made(Server(hopeless=Reason.QUEUE_FULL))
    await ask(front)
    _, text, _ = await ask(front, method="GET", path="/metrics", body=None)
    found = {one.name: one for one in text_string_to_metric_families(text)}
    (sample,) = found["fluidtune_serve_requests"].samples
    assert (sample.labels, sample.value) == ({"trial": "t", "version": "1", "outcome": "refused: queue_full"}, 1.0)


def tensor(count, **others):
    """A request with so many inputs, and with these other fields."""
    one = {"name": "input", "shape": [count], "datatype": "INT64", "data": [1] * count}
    return {"path": "/v2/models/t/infer", "body": json.dumps({"inputs": [one], **others}).encode()}


async def test_a_request_names_itself_and_its_own_deadline(many):
    headers = [(b"x-request-id", b"mine"), (b"request-timeout-ms", b"20000")]
    status, value, said = await answering(many, 1, [(200, "2")], headers=headers)
    assert (status, value, said["X-Request-Id"]) == (200, 2, "mine")
    assert 0 < many.server.withins[0] < 20, "what was spent before counts"
    assert len((await ask(many, method="GET", path="/healthz"))[2]["X-Request-Id"]) == 32
    status, said, _ = await ask(many, headers=[(b"request-timeout-ms", b"soon")])
    assert status == 400 and "Request-Timeout-Ms is 'soon'" in said["error"]


@pytest.mark.parametrize(("timeout", "hurried"), [(b"10", 1), (b"600000", 0)])
@pytest.mark.parametrize("hopeless", [None, Reason.QUEUE_FULL])
async def test_what_a_client_wants_sooner_than_the_slo_is_counted_as_hurried(hopeless, timeout, hurried):
    front = made(Server(hopeless=hopeless), slo=0.02)
    assert (await ask(front, headers=[(b"request-timeout-ms", timeout)]))[0] == 503
    total = front.books.total()
    assert (total.requests["t"].total(), total.hurried["t"].total()) == (1, hurried)


@pytest.mark.parametrize("given", [{}, tensor(1)])
@pytest.mark.parametrize(("takes", "slow"), [(0.0, 0), (0.3, 1)])
async def test_what_a_client_took_to_send_its_body_is_no_load(given, takes, slow):
    """Seen: clients that send their bodies slowly made a service on leases ask for more devices."""
    front = made(slo=0.5)
    assert (await ask(front, takes=takes, **given))[1]["error"]
    total = front.books.total()
    assert (total.requests["t"], total.hurried["t"].total()) == ({"late": 1}, slow)


async def test_whoever_has_not_the_token_is_told_so_and_probes_need_none():
    front = made(token="secret-token", slo=0.01)
    status, said, headers = await ask(front, body=None)
    assert (status, said["code"], headers["Www-Authenticate"]) == (401, "unauthorized", "Bearer")
    assert (await ask(front, body=None, headers=[(b"authorization", "Bearer sécret".encode("latin-1"))]))[0] == 401
    assert (await ask(front, method="GET", path="/metrics", body=None))[0] == 401
    for probe in ("/healthz", "/v2/health/live/"):
        assert (await ask(front, method="GET", path=probe, body=None))[0] == 200
    assert (await ask(front, headers=[(b"authorization", b"Bearer secret-token")]))[1]["code"] == "overdue"


@pytest.mark.parametrize("other", [None, (200, "2"), ValueError("no")])
async def test_a_batch_of_tensors_is_answered_whole_or_refused(many, other):
    """other: what becomes of another of its inputs."""
    status, value, _ = await answering(many, 2, [(200, "2"), (200, "4")], **tensor(2))
    assert (status, value["outputs"][0]["data"], value["model_version"]) == (200, [2, 4], "1")
    refused = Refused("t", Reason.LATE)
    told = [refused] if other is None else [other, refused]
    status, value, _ = await answering(many, 2, told, **tensor(2))
    assert (status, value) == (503, {"error": Reason.LATE.value, "code": "late"})
    assert many.server.answers[1].cancelled() == (other is None)
    assert many.books.requests("t") == {"answered": 2, "refused: late": 2}
    assert (await ask(many, path="/v2/models/u/infer"))[0] == 404
    assert (await ask(many, path="/v2/models/t/infer", body=b"{}"))[1]["code"] == "bad_input"


@pytest.mark.parametrize(("count", "late", "code"), [(21, False, "queue_full"), (20, True, "late_on_arrival")])
async def test_inputs_that_are_hopeless_together_are_not_even_asked_for(count, late, code):
    """late: decoding them takes until after the deadline."""
    front = made(Server(most=20), slo=PATIENCE_S)
    decode = front.rollouts.answering["t"].interface.decode
    tensors = SimpleNamespace(decode=lambda *given, most: time.sleep(0.02 * late) or decode(*given, most))
    tensors.check_outputs = lambda names: None
    front.have(interface=tensors)
    headers = [(b"request-timeout-ms", b"15")] if late else []
    status, said, _ = await ask(front, **tensor(count), headers=headers)
    assert (status, said["code"], front.server.answers) == (503, code, [])
    assert front.books.requests("t") == {f"refused: {code}": count}
    assert front.intake.open == 0


@pytest.mark.parametrize(("sent", "code", "counted"), [(False, "late", "refused: late"), (True, "overdue", "late")])
async def test_inputs_of_which_some_are_not_asked_for_in_time_are_late(many, sent, code, counted):
    """And overdue, if a model may have seen one: then a client must not ask again by itself."""
    asked = await begun(many, 1, **tensor(130), headers=[(b"request-timeout-ms", b"200")])
    many.server.answers[0].sent = sent
    async with many.intake.inputs.one():
        await asyncio.sleep(0.4)  # until after the deadline
    status, said, _ = await asked
    assert (status, said["code"]) == (503, code)
    assert many.books.requests("t") == {counted: 130}


async def test_in_a_turn_of_the_loop_a_piece_of_all_inputs_is_asked_for(many):
    """Seen: requests of 1,024 inputs held the front's loop, so that `/healthz` did not answer for seconds."""
    counts, turns, before = [3, 1000, 500, *[2] * 100], [], 0
    asked = [asyncio.ensure_future(ask(many, **tensor(count))) for count in counts]
    while before < sum(counts) and not any(one.done() for one in asked):
        await asyncio.sleep(0)
        turns.append(len(many.server.answers) - before)
        before += turns[-1]
    assert many.intake.open == sum(counts)
    many.server.answer(*[(200, "1")] * before)
    told = [await one for one in asked]
    assert [len(value["outputs"][0]["data"]) for _, value, _ in told] == counts
    assert max(turns) < 2 * ASKED
    assert many.books.requests("t") == {"answered": sum(counts)}
    assert many.intake.open == 0


@pytest.mark.parametrize("asked", [1, 1024])
@pytest.mark.parametrize("gone", [True, False])
async def test_inputs_that_are_of_no_use_are_not_asked_for_and_a_piece_is_cancelled_in_a_turn_of_the_loop(
    many, gone, asked
):
    """The client has gone, or one of the first inputs was refused, when so many of the 1,024 have been asked for."""
    answers, turns, before, left = many.server.answers, [], 0, asyncio.Event()
    asking = await begun(many, asked, gone=left, **tensor(1024))
    left.set() if gone else answers[0].set_exception(Refused("t", Reason.LATE))
    while not asking.done():
        await asyncio.sleep(0)
        turns.append(sum(one.cancelled() for one in answers) - before)
        before += turns[-1]
    status, said, _ = await asking
    assert (status, said["code"]) == ((400, "disconnected") if gone else (503, "late"))
    assert many.books.requests("t") == {"cancelled" if gone else "refused: late": 1024}
    assert len(answers) <= (4 * ASKED if asked == 1 else 1024)
    assert all(answer.cancelled() for answer in answers[1:]) and max(turns) <= 2 * ASKED


async def test_a_request_that_is_cut_off_cancels_all_its_inputs(many):
    left = asyncio.Event()
    asked = await begun(many, 1024, gone=left, **tensor(1024))
    left.set()
    while not any(one.cancelled() for one in many.server.answers):
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    assert all(one.cancelled() for one in many.server.answers)


async def test_the_inputs_of_a_request_are_open_each(many):
    """There is room for ten. Seen: a request of 1,024 inputs counted as one of the 10,000 that may be open."""
    many.intake.open = others = MOST_OPEN - 10
    asked = [await begun(many, 8, **tensor(8))]
    refused = await ask(many, **tensor(3))
    assert many.intake.open == others + 8
    asked += [await begun(many, count) for count in (9, 10)]
    unread = await ask(many, body=None)
    assert (unread[1]["code"], unread[1]["reason"]) == ("too_many", "10000 inputs are open already")
    many.server.answer(*[(200, "1")] * 10)
    assert [(await one)[0] for one in asked] == [200] * 3
    assert (refused[0], refused[1]["code"]) == (503, "too_many")
    assert many.books.requests("t") == {"answered": 10, "refused: too_many": 4}
    assert many.intake.open == others


async def test_an_output_that_is_no_tensor_of_the_metadata_is_one_failure_of_the_model(many):
    """Seen: the client got 400 after the model had run, and the request counted as answered and as bad."""
    many.have(interface=Interface.of([1], [{"cat": 0.9}]))
    status, said, _ = await answering(many, 2, [(200, '{"cat": 1}'), (200, "5")], **tensor(2))
    assert (status, said["code"]) == (500, "model_failed")
    assert "is a int, expected an object with the keys 'cat'" in said["error"]
    assert many.books.requests("t") == {"failed": 2}


async def test_an_output_that_another_version_has_not_is_refused_before_it_is_asked(many):
    """The version that reads the request is not the one that is there when it is read."""
    about, before = many.rollouts.answering["t"], Interface.of([1], [{"cat": 0.9}])

    def decode(*given, most):
        many.have(interface=about.interface)
        return before.decode(*given, most)

    many.have(interface=SimpleNamespace(decode=decode))
    status, said, _ = await ask(many, **tensor(1, outputs=[{"name": "cat"}]))
    assert (status, said["error"]) == (400, "the model has no output 'cat'; it has 'output'")
    assert (many.server.answers, many.books.requests("t")) == ([], {"bad": 1})


async def test_a_large_answer_waits_for_no_body_and_is_refused_at_its_deadline(many):
    """Seen: while large bodies were read, large answers waited past their SLO, and were counted as answered.

    Seen: a client that asked for large outputs held the front's loop for a tenth of a second each time.
    """
    reads, writes, began = threading.Event(), threading.Event(), []
    about, large = many.rollouts.answering["t"].interface, (200, json.dumps([0.5] * 100_000))

    def slow(does, ends):
        return lambda *given: began.append(does) or (ends.wait(PATIENCE_S) and does(*given))

    form, encode = about.form.trouble, about.encode
    tensors = SimpleNamespace(decode=about.decode, encode=encode, check_outputs=about.check_outputs)
    tensors.form = SimpleNamespace(trouble=slow(form, reads))
    many.have(interface=tensors)
    try:
        body = asyncio.ensure_future(ask(many, body=b" " * (200 << 10) + b"1"))
        while not began:
            await asyncio.sleep(0.001)
        assert (await answering(many, 1, [large], **tensor(1)))[0] == 200
        tensors.encode = slow(encode, writes)
        status, said, _ = await answering(many, 1, [large], headers=[(b"request-timeout-ms", b"200")], **tensor(1))
        reads.set()
        plain = await answering(many, 1, [large])
        body.cancel()
    finally:
        reads.set()
        writes.set()
    assert (status, said["code"], plain[0], began) == (503, "overdue", 200, [form, encode, form])
    assert many.books.requests("t") == {"answered": 2, "late": 1}

"""A front without Ray: stand-ins for what it asks, and a client that asks it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from types import SimpleNamespace

from fluidtune.serving.front import Front
from fluidtune.serving.intake import Intake
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_versions import Version, Versions
from fluidtune.serving.rollouts import Answering
from fluidtune.serving.service_controller import ServiceController
from fluidtune.serving.service_devices import Devices
from fluidtune.serving.watching import Books
from symphony_serve.delays import Delays
from symphony_serve.messages import Reason
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile


class Waits(asyncio.Future):
    """Stands for an `Answer`."""

    sent = False


class Server:
    """Stands for an `AsyncServer`. Its answers come when the test gives them.

    most: more requests than these are hopeless. values, withins: of the inputs that were asked for.
    """

    def __init__(self, able=1, hopeless=None, most=math.inf):
        self.able, self._hopeless, self._most = able, hopeless, most
        self.answers, self.values, self.withins = [], [], []

    def hopeless(self, name, within, count=1):
        if within < 0:
            return Reason.LATE_ON_ARRIVAL
        return self._hopeless if count <= self._most else Reason.QUEUE_FULL

    def least_latency(self, name):
        return 0.3

    def able_for(self, name):
        return self.able > 0

    def ask(self, name, value, within, source=""):
        self.values.append(value)
        self.withins.append(within)
        self.answers.append(Waits())
        return self.answers[-1]

    def answer(self, *told):
        """Give these to what was asked for, in its order; an exception is raised."""
        for answer, one in zip(self.answers, told, strict=False):
            answer.set_exception(one) if isinstance(one, Exception) else answer.set_result(one)


class Controller(ServiceController):
    """One that serves trial "t", whose inputs are numbers, with these parts. front: asks it."""

    state, stopping, document, placed = "serving", False, b"", None

    def __init__(self, setting, **parts):
        self._setting = setting
        vars(self).update(parts)
        self.front = Front(setting, self)

    def have(self, **what):
        """What is known of the model."""
        self.rollouts.answering["t"] = dataclasses.replace(self.rollouts.answering["t"], **what)


def made(server=None, slo=0.5, count=1, waits="", token=None, names=("t",), samples=(1,), most=1 << 20):
    """A front, and what it asks. most: bytes of a body."""

    class There(Devices):
        """So many devices."""

    There.count, There.waits = count, waits
    model = Model("t", Profile.linear(0.0, 1e-9, 1), 1.0, delays=Delays(jitter=0.01))
    answering = dict.fromkeys(names, Answering.of(model, Samples(list(samples), [2]), most))
    rollouts = SimpleNamespace(versions=Versions(Version(1, "t", "run", state="serving")), answering=answering)
    devices, intake, books = There(None, None, None), Intake(slo), Books(names)
    trials = [SimpleNamespace(name=name, value=None) for name in names]
    about = {"token": token, "placing": None, "slo_of": lambda name: slo}
    setting = SimpleNamespace(slo=slo, loading=SimpleNamespace(trials=trials), **about)
    parts = {"devices": devices, "intake": intake, "books": books, "rollouts": rollouts}
    return Controller(setting, server=server or Server(), **parts)


async def ask(controller, method="POST", path="/", body=b"1", half=False, gone=None, headers=(), takes=0.0):
    """The status, the value and the headers of an answer.

    body: None: nothing is to be read; a list: the parts in which it comes, of which those stay that were not read.
    gone: an event; the client hangs up when it is set. takes: seconds after which each part is there.
    """
    parts, sent = body if isinstance(body, list) else [body], []

    async def receive():
        if not parts:
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        assert part is not None, "nothing is to be read"
        if takes:
            await asyncio.sleep(takes)
        return {"type": "http.request", "body": part, "more_body": half or bool(parts)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
    await controller.front(scope, receive, send)
    start, *rest = sent
    said = {name.decode().title(): value.decode() for name, value in start["headers"]}
    text = b"".join(one.get("body", b"") for one in rest)
    return start["status"], json.loads(text) if "json" in said.get("Content-Type", "") else text.decode(), said


async def begun(controller, count, **given):
    """A request, when the model has been asked for ``count`` inputs in all."""
    asking = asyncio.ensure_future(ask(controller, **given))
    while len(controller.server.answers) < count and not asking.done():
        await asyncio.sleep(0)
    return asking


async def answering(controller, count, answers, **given):
    """The answer to a request, when the model has given ``answers`` to the first of its ``count`` inputs."""
    controller.server.answers.clear()
    asking = await begun(controller, count, **given)
    controller.server.answer(*answers)
    return await asking

"""The sides of `benchmarks.serve_http`: one model behind `fluidtune serve`, Ray Serve, LitServe or BentoML, on a port.

A side is a context manager over the service. What it yields sets a `Setting`, by a call (Ray Serve) or by another start
of the server (LitServe, BentoML); `fluidtune serve` has none. Every model runs on one core. LitServe and BentoML run as
their documentation says: one worker, and one process for HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from benchmarks.common import ROOT
from benchmarks.serve_http_client import JSON, body, images
from benchmarks.serve_real import classify, digits_network

#: Seconds. Judgement: ten times the way through Ray Serve's proxy on a busy machine of two cores.
SLO_S = 0.5
MAX_BATCH = 64
#: The Python of LitServe and BentoML: ``make rivals-installed``.
RIVALS = ROOT / ".venv-rivals" / "bin" / "python"
#: Seconds until a rival's server answers.
START_S = 60.0
#: Ray Serve's fast ingress, which is off by default: HAProxy, which `ray[serve]` brings, hands requests to the replicas
#: themselves, and Ray Serve's own calls are gRPC. A Ray that has none of it ignores them. Source: Ray 2.60's
#: `ray/serve/_private/constants.py`. The next two take back what its flag for throughput does besides: a model in the
#: event loop of its replica, which then reads no requests meanwhile, and no handle outside of an event loop. With the
#: last one the replicas end at once, as no request is on its way when a side is ended.
FAST_INGRESS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}


class Setting(NamedTuple):
    """What a rival can choose. ``None``: without a bound.

    size: the most requests of a batch. wait_s: seconds that a batch waits for more requests; for BentoML the latency
    that its dispatcher aims at. limit: for Ray Serve, batches that may wait; for LitServe, seconds after which a
    request that waits is refused; BentoML has none.
    """

    size: int
    wait_s: float
    limit: float | None

    def __str__(self) -> str:
        return f"size {self.size}, wait {1e3 * self.wait_s:.0f} ms, limit {self.limit}"


#: Sets `Setting` at a rival's server.
Choose = Callable[[Setting], None]

SIZES = (8, 16, 32)
#: The settings that are tried of each rival.
SETTINGS: dict[str, list[Setting]] = {
    # A wait can only help where the queue becomes empty.
    "serve_batch": [Setting(size, 0.0, limit) for size, limit in product(SIZES, (1, 2, None))]
    + [Setting(size, 0.05, 2) for size in SIZES],
    "litserve": [Setting(size, 0.0, limit) for size, limit in product(SIZES, (None, SLO_S, SLO_S / 2))]
    + [Setting(size, 0.05, SLO_S / 2) for size in SIZES],
    "bentoml": [Setting(size, wait, None) for size, wait in product((16, 32, 64), (SLO_S / 2, 0.8 * SLO_S, SLO_S))],
}


def train(config: dict[str, Any]) -> None:
    """A trial that reports its network of ``channels`` as it is; its weights do not matter for its time."""
    import torch
    from ray import tune
    from ray.tune import Checkpoint

    with tempfile.TemporaryDirectory() as directory:
        torch.save(digits_network(config["channels"]).state_dict(), os.path.join(directory, "state.pt"))
        tune.report({"accuracy": 0.1}, checkpoint=Checkpoint.from_directory(directory))


def load(directory: str, config: dict[str, Any]) -> Callable[[list[Any]], list[int]]:
    """The network of the trial."""
    import torch

    state = torch.load(os.path.join(directory, "state.pt"))
    network = digits_network(len(state["0.bias"]))
    network.load_state_dict(state)

    def answer(images: list[Any]) -> list[int]:
        return classify(network, [torch.tensor(image).reshape(1, 8, 8) for image in images])

    answer.samples = images()  # type: ignore[attr-defined]
    return answer


@contextlib.contextmanager
def ours(starts: str, run: str, port: int) -> Iterator[None]:
    """`fluidtune.serve`."""
    import fluidtune

    with fluidtune.serve(
        run, load, SLO_S, starts=starts, metric="accuracy", mode="max", max_batch=MAX_BATCH, port=port
    ):
        yield


@contextlib.contextmanager
def serve_batch(run: str, port: int) -> Iterator[Choose]:
    """One replica with the model, whose method has ``@serve.batch``; requests over the limit get 503 at once."""
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    with _checkpoint(run) as directory:

        class Batching:
            def __init__(self) -> None:
                self._model = load(directory, {})
                self._waiting, self._limit = 0, 1 << 30

            def set(self, size: int, wait_s: float, limit: int | None) -> None:
                self.answer.set_max_batch_size(size)  # type: ignore[attr-defined]
                self.answer.set_batch_wait_timeout_s(wait_s)  # type: ignore[attr-defined]
                self._limit = 1 << 30 if limit is None else (1 + limit) * size

            @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0.0)
            async def answer(self, inputs: list[Any]) -> list[int]:
                return self._model(inputs)

            async def __call__(self, request: Request) -> Response:
                if self._waiting >= self._limit:
                    return Response("{}", 503)
                self._waiting += 1
                try:
                    return Response(json.dumps(await self.answer(json.loads(await request.body()))))
                finally:
                    self._waiting -= 1

        logs = {"log_level": "WARNING", "enable_access_log": False}
        actor = {"num_cpus": 1}
        deployment = serve.deployment(max_ongoing_requests=100_000, ray_actor_options=actor, logging_config=logs)
        serve.start(http_options=serve.HTTPOptions(host="127.0.0.1", port=port), logging_config=logs)
        handle = serve.run(deployment(Batching).bind())
        try:
            # HAProxy refuses connections until its first replica is known.
            _until("it answers", lambda: _answers("serve_batch", port))
            yield lambda setting: handle.set.remote(*setting).result()
        finally:
            serve.shutdown()
            _until("its controller has ended", lambda: not _controlled())


@contextlib.contextmanager
def restarted(name: str, run: str, port: int) -> Iterator[Choose]:
    """LitServe or BentoML, a new server for each setting."""
    with _checkpoint(run) as directory, contextlib.ExitStack() as running:

        def choose(setting: Setting) -> None:
            running.close()
            running.enter_context(_program(name, directory, port, setting))

        yield choose


SIDES: dict[str, Callable[[str, int], contextlib.AbstractContextManager[Choose | None]]] = {
    "serve_batch": serve_batch,
    "litserve": partial(restarted, "litserve"),
    "bentoml": partial(restarted, "bentoml"),
    "deferred": partial(ours, "deferred"),
    "eager": partial(ours, "eager"),
}


#: Module and arguments of a rival's program. The environment variable SIDE has directory, port and setting.
PROGRAMS: dict[str, Callable[[int], list[str]]] = {
    "litserve": lambda port: ["benchmarks.serve_http_litserve"],
    "bentoml": lambda port: (
        f"bentoml serve benchmarks.serve_http_bentoml:Digits --host 127.0.0.1 --port {port} --api-workers 1".split()
    ),
}


def given() -> tuple[str, int, Setting]:
    """The directory of the checkpoint, the port and the setting, in a rival's program."""
    directory, port, setting = json.loads(os.environ["SIDE"])
    return directory, port, Setting(*setting)


@contextlib.contextmanager
def _checkpoint(run: str) -> Iterator[str]:
    """The directory of the run's best checkpoint."""
    from fluidtune.serving.winners import winners

    with winners(run, 1, "accuracy", "max")[0].checkpoint.as_directory() as directory:
        yield directory


@contextlib.contextmanager
def _program(name: str, directory: str, port: int, setting: Setting) -> Iterator[None]:
    """A rival's server, until it answers; it is ended with all its processes, a session of their own."""
    here = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    side = json.dumps([directory, port, setting])
    settings = {"OMP_NUM_THREADS": "1", "BENTOML_DO_NOT_TRACK": "True", "PYTHONPATH": here, "SIDE": side}
    if not RIVALS.exists():
        raise RuntimeError(f"{RIVALS} is not there; call: make rivals-installed")
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [str(RIVALS), "-m", *PROGRAMS[name](port)],
            env=os.environ | settings,
            stdout=said,
            stderr=said,
            start_new_session=True,
            cwd=directory,
        )
        try:
            end = time.monotonic() + START_S
            while not _answers(name, port):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise RuntimeError(f"{name} does not answer: {said.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _controlled() -> bool:
    """Whether there is a controller of Ray Serve. A start that finds one that is about to end fails."""
    import ray

    return any(one["namespace"] == "serve" for one in ray.util.list_named_actors(all_namespaces=True))


def _until(what: str, reached: Callable[[], bool]) -> None:
    """Wait until Ray Serve is so far. Raises RuntimeError after `START_S`."""
    end = time.monotonic() + START_S
    while not reached():
        if time.monotonic() > end:
            raise RuntimeError(f"Ray Serve: not yet after {START_S:g} s: {what}")
        time.sleep(0.2)


def _answers(name: str, port: int) -> bool:
    """Whether the server at the port answers an image."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("POST", "/", body(name, images()[0]), JSON)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()

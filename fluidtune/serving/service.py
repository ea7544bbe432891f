"""`fluidtune.serve`, and what `fluidtune serve` calls: starts the front, looks at it, stops it."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import math
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.tune import ResultGrid

from fluidtune.cluster.devices.layout import DeviceSpec
from fluidtune.cluster.forks.preload import listed_modules
from fluidtune.cluster.forks.quick_nodes import start_quick_nodes
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import kept_state
from fluidtune.ray_compat.accelerators import without_gpus
from fluidtune.ray_compat.job_metadata import user_of_job
from fluidtune.report.terminal_text import printable
from fluidtune.serving.address import is_of_this_machine, listening, url_of
from fluidtune.serving.capacity import start_policy
from fluidtune.serving.held_checkpoints import held, let_go
from fluidtune.serving.model_process import MODEL_PROCESS, Loading
from fluidtune.serving.placed_models import Models, placed_models
from fluidtune.serving.process import HUNG_S, LOAD_S
from fluidtune.serving.setting import Following, Placing, Setting
from fluidtune.serving.winners import Winner, ranking, run_directory, winner_named, winners
from symphony_serve.errors import ServeError
from symphony_serve.model_side import Batching, StartPolicy
from symphony_serve.placement.stages import GIB

if TYPE_CHECKING:
    from fluidtune.serving.model_leases import Leasing

logger = logging.getLogger(__name__)

#: The name of the front's actor, and its namespace.
APP, NAMESPACE = "serving", "fluidtune"
#: The largest batch, unless the caller says otherwise; as `measure_models`.
MAX_BATCH = 64
#: The largest number of a TCP port. Source: RFC 9293. (0, which lets the system choose, would be unknown to clients.)
MOST_PORT = 65535
#: Seconds between two looks at a front that starts, and for it to answer.
LOOK_S, ANSWER_S = 0.2, 30.0
#: Seconds for the front's process to start: it imports what this process has, on a busy machine.
START_S = 120.0
#: What `fluidtune[serve]` brings.
NEEDS = ("uvicorn", "starlette", "httptools", "prometheus_client")
#: Calls of the front's actor at once: a stop does not wait behind others' status.
CALLS = 8
#: Seconds after which a start that waits for a lease says so. A free device is leased within two or three.
PATIENT_S = 5.0
#: The resource of the cluster's head node, and a part of it: the front is where clients reach the cluster. Source:
#: Ray's documentation of `ray.nodes`.
HEAD = {"node:__internal_head__": 0.001}
#: One process, whose core is the search's in Ray's books.
BESIDE: tuple[int, dict[str, float]] = (1, {"num_cpus": 0.0})
#: By what the arbiter leases, Ray's options for a model process.
OPTIONS: dict[str, dict[str, float]] = {"CPU": {"num_cpus": 1.0}, "GPU": {"num_cpus": 0.0, "num_gpus": 1.0}}


class Served:
    """Trials or models that answer requests. `url` is where: POST an input to it, or to url/TRIAL or url/MODEL.

    It goes on until `stop`, or until the Ray cluster ends. Use it as a context manager, or `stop` it.
    """

    def __init__(self, url: str, trials: list[str]):
        self.url, self.trials = url, trials

    def status(self) -> dict[str, Any]:
        """As `fluidtune serve status --json` prints it; docs/serving.md has the keys."""
        return status()

    def deploy(
        self, results: ResultGrid | str | Path, trial: str | None = None, canary: float = 1.0, **ranked: str | None
    ) -> dict[str, Any]:
        """Load another checkpoint beside the one that serves, measure it, and move the requests over to it.

        trial: its id; None: the best one. canary: the part of the requests that it gets until `promote`; 1: it gets all
        at once. ranked: ``metric`` and ``mode``, as for `fluidtune.serve`. Returns the version as it is in `status`.
        Raises FluidTuneError if it cannot be served; the version before serves on.
        """
        return deploy(results, trial, canary, **ranked)

    def promote(self) -> None:
        """Let the canary answer all requests. Raises FluidTuneError if there is none."""
        promote()

    def rollback(self) -> None:
        """Put the version before the last deploy back. Raises FluidTuneError if there is none."""
        rollback()

    def stop(self) -> None:
        """Answer what runs, refuse what waits, and end all processes."""
        stop()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def serve(
    results: ResultGrid | str | Path | None = None,
    load: Callable[..., Any] | None = None,
    slo: float | None = None,
    *,
    models: Models | None = None,
    memory: float | None = None,
    search_s: float = 10.0,
    top: int = 1,
    devices: str | None = None,
    metric: str | None = None,
    mode: str | None = None,
    starts: str = "eager",
    max_batch: int = MAX_BATCH,
    max_body: int | None = None,
    beside: bool = False,
    arbiter: str | None = None,
    fork_server: bool = True,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    no_token: bool = False,
    cors: Sequence[str] = (),
    batching: str = "auto",
    follow: float | None = None,
    stages: int = 1,
    stage_memory: float | None = None,
) -> Served:
    """Let the best trials of a finished run answer requests over HTTP, each within ``slo`` seconds or not at all.

    Or let several models answer, each within an SLO of its own, of which each device holds some.

    Args:
        results: what `Tuner.fit` returned, or the run's directory.
        load: ``load(checkpoint_directory, config)`` returns a trial's model: a function from a list of inputs to as
            many outputs. Inputs and outputs are JSON values or arrays, as its attribute ``samples``, which has inputs.
            They are what is measured at the start; a request whose input has another form than they is answered with
            400. An output may be an exception, such as `fluidtune.BadInput`. The directory may be gone when ``load``
            has returned.
        slo: seconds from a request to its answer. Requests that cannot be answered in time get 503 before that.
        models: in place of ``results``, ``load`` and ``slo``: a TOML file, or a list of tables with its keys, as
            docs/placement.md has them; ``load`` of a table may be a function.
        memory: with ``models``, GiB that the models of a device take at most, at any moment. Default: no limit.
        search_s: with ``models``, seconds that a search for a placement takes at most.
        top: how many trials are served, the best ones.
        devices: "cpu:N" or "gpu:N": N devices of one core or one GPU, each with a process for each model. Default:
            one. With an arbiter, N at most, and by default any number.
        metric, mode: by which trials are ranked. Default: those of the run, if FluidTune ran it.
        starts: when a batch starts: "eager", as soon as a device is idle, or "deferred", as late as it may.
        max_batch: no larger batch is formed.
        max_body: bytes of a request's body. A larger one gets 413, and most of it is not read. Default: 64 times the
            longest of the samples of its model, as JSON, and 1 MiB at least.
        beside: the models take turns on one core of this machine with the trials of a search whose executor has
            ``beside`` as well. A batch waits for one iteration of a trial at most, and counts that against the SLO.
        arbiter: "auto": the service leases as many devices as its load wants from the cluster's arbiter, which is
            started if there is none, beside tuning jobs that do the same. While it holds none, requests get 503. None:
            the devices are the service's own.
        fork_server: processes of models are forked from one that has imported what this process has, where that is
            possible. False: they are started as Ray starts processes.
        host, port: where HTTP is served.
        token: whoever asks must send it as ``Authorization: Bearer TOKEN``, probes apart. None: every client that
            reaches the address may ask. Where other machines reach it, that is refused without ``no_token``.
        cors: origins, such as "https://example.org", whose pages may ask from a browser. Default: none.
        batching: which requests form a batch: "window", "orloj" for models whose times vary by the input, or "auto":
            "orloj" while the times of batches of one size vary.
        follow: the run may still go on. Its best trial's latest checkpoint is served. The number is the seconds from
            one look at the run to the next; what is better than all versions that the status shows is deployed
            (`Served.deploy`).
        stages: each device is a group of ``stages`` processes of ``devices``. The model, a `torch.nn.Sequential` or an
            object with a list of functions ``stages``, is cut between them so that the slowest is as fast as it can be.
            While one runs a batch, the one before it runs the next.
        stage_memory: GiB of weights that each of these processes has at most. Default: any.

    Uses the Ray cluster that this process is connected to, or connects as Ray Tune does. Needs ``fluidtune[serve]``.
    Raises FluidTuneError if nothing can be served, or if the models are too slow for the SLO, with both numbers.
    """
    if models is not None:
        others = {"results": results, "load": load, "slo": slo, "metric": metric, "mode": mode, "arbiter": arbiter}
        others |= {"follow": follow, "beside": beside or None, "top": None if top == 1 else top}
        others |= {"stages": None if stages == 1 else stages, "stage_memory": stage_memory}
        _check_alone(others)
        placing, chosen, run = _placing(models, memory, search_s, devices)
        trials, slo = list(chosen), max(one.slo for one in placing.models)
        following, loading = None, Loading(b"", tuple(sys.path), tuple(chosen))
    elif results is None or load is None or slo is None:
        raise FluidTuneError("give results, load and slo, or models")
    elif memory is not None:
        raise FluidTuneError(f"memory is {memory!r}, and is for several models; give models, or leave it out")
    else:
        following = _following(results, top, metric, mode, follow) if follow is not None else None
        trials = winners(results, top, metric, mode, running=follow is not None)
        placing, loading, run = None, Loading.of(load, trials, beside), run_directory(results)
    policy = _checked(slo, max_batch, max_body, port, starts, token, cors)
    if token is None and not no_token and not is_of_this_machine(host):
        raise FluidTuneError(f"other machines reach host {host!r}: give a token, or no_token if all of them may ask")
    former = _former(batching)
    if stages != 1 or stage_memory is not None:
        former = _in_stages(stages, stage_memory, former, top=top != 1, beside=beside, arbiter=arbiter, follow=follow)
    check_installed()
    if not ray.is_initialized():
        start_quick_nodes()
        ray.init(log_to_driver=False)
    leasing = _leasing(devices, beside, arbiter, run) if arbiter is not None else None
    count, resources = _resources(devices, beside, stages) if leasing is None else (0, OPTIONS[leasing.unit])
    hidden = {} if resources.get("num_gpus") else without_gpus(dict(ray.get_runtime_context().runtime_env))
    loading = replace(loading, environment=hidden)
    if not kept_state.can_keep():
        said = "over Ray Client a service cannot be started"
        raise FluidTuneError(f"{said}; start it in a process on the cluster, for example by `ray job submit`")
    _check_free(host, port)

    modules = (*listed_modules(sys.modules), MODEL_PROCESS) if fork_server else None
    setting = Setting(run, loading, slo, resources, count, max_batch, max_body, policy, modules, leasing)
    setting = replace(setting, token=token, cors=tuple(cors), batching=former, following=following, stages=stages)
    setting = replace(setting, room=math.inf if stage_memory is None else stage_memory * GIB, placing=placing)
    setting = _held(setting)
    try:
        _start(setting, host, port)
    except BaseException:
        let_go(setting.loading.trials, setting.run)
        raise
    return Served(url_of(host, port), [trial.name for trial in trials])


#: What the command line calls a setting that has another name there.
OPTION = {"results": "RUN_DIR", "arbiter": "--shared", "search_s": "--seconds"}


def _said(name: str) -> str:
    """A setting as whoever reads of it knows it, from the command line or from Python."""
    return f"{name} ({OPTION[name]})" if name in OPTION else name


def _check_alone(others: Mapping[str, Any]) -> None:
    """Raises FluidTuneError if one is given of what is for trials."""
    for name, value in others.items():
        if value is not None:
            why = "several models share no leases" if name == "arbiter" else "it is for the trials of one run"
            raise FluidTuneError(f"models and {_said(name)} do not go together: {why}; leave one of the two out")


def _placing(
    models: Models, memory: float | None, search_s: float, devices: str | None
) -> tuple[Placing, list[Winner], str]:
    """How the models are placed, what is loaded of each, and where the log is kept."""
    for name, value in (("memory", memory), ("search_s", search_s)):
        good = isinstance(value, Real) and not isinstance(value, bool) and 0 < value < math.inf
        if value is not None and not good:
            raise FluidTuneError(f"{_said(name)} is {value!r}, expected a number above 0")
    size = math.inf if memory is None else memory * GIB
    spec = DeviceSpec.parse(devices)
    count = spec.count if spec is not None and spec.count else 1
    placed, chosen, run = placed_models(models, loader, count, size)
    return Placing(tuple(placed), size, search_s), chosen, run


def _checked(
    slo: float, max_batch: int, max_body: int | None, port: int, starts: str, token: str | None, cors: Sequence[str]
) -> StartPolicy:
    """The policy called ``starts``. Raises FluidTuneError if one of the settings is impossible."""
    if not isinstance(slo, Real) or not 0 < slo < math.inf:
        raise FluidTuneError(f"slo is {slo!r}, expected seconds above 0")
    if not isinstance(max_batch, Integral) or max_batch < 1:
        raise FluidTuneError(f"max_batch is {max_batch!r}, expected 1 or more")
    if max_body is not None and (not isinstance(max_body, Integral) or max_body < 1):
        raise FluidTuneError(f"max_body is {max_body!r}, expected bytes, 1 or more")
    if not isinstance(port, Integral) or not 1 <= port <= MOST_PORT:
        raise FluidTuneError(f"port is {port!r}, expected one of 1 to {MOST_PORT}")
    if token is not None and not (isinstance(token, str) and re.fullmatch(r"[\x21-\x7e]{8,}", token)):
        raise FluidTuneError("token is too short or has other than printable ASCII characters; give 8 or more of these")
    if isinstance(cors, str) or not all(
        isinstance(one, str) and re.fullmatch(r"\*|https?://[^/]+", one) for one in cors
    ):
        raise FluidTuneError(f'cors is {cors!r}, expected a list of origins such as "https://example.org", or "*"')
    return start_policy(starts)


def _following(
    results: ResultGrid | str | Path, top: int, metric: str | None, mode: str | None, every: float
) -> Following:
    """How the search is followed. Raises FluidTuneError if it cannot be."""
    if not isinstance(every, Real) or not 0 < every < math.inf:
        raise FluidTuneError(f"follow is {every!r}, expected seconds between two looks, above 0")
    if top != 1:
        raise FluidTuneError(f"follow is for the best trial alone, and top is {top}; leave one of the two out")
    where = run_directory(results)
    metric, mode = ranking(where, metric, mode)
    if metric is None or mode is None:
        raise FluidTuneError(f"{where} does not tell by which metric its trials are ranked; give metric and mode")
    return Following(float(every), metric, mode)


def _former(batching: str) -> Batching:
    try:
        return Batching(batching)
    except ValueError:
        raise FluidTuneError(f"batching is {batching!r}, expected {', '.join(one.value for one in Batching)}") from None


def _in_stages(stages: int, memory: float | None, former: Batching, **others: Any) -> Batching:
    """What forms batches for a model in stages. others: settings that do not go with stages, by name.

    Raises FluidTuneError if one of them is set, or one of the first two is impossible.
    """
    if not isinstance(stages, Integral) or stages < 1:
        raise FluidTuneError(f"stages is {stages!r}, expected a number of processes, 1 or more")
    if memory is not None and (stages == 1 or not isinstance(memory, Real) or not 0 < memory < math.inf):
        raise FluidTuneError(f"stage_memory is {memory!r}, expected GiB above 0 of each of several stages")
    if stages == 1:
        return former
    given = [name for name, value in others.items() if value]
    if given:
        raise FluidTuneError(f"a model in stages is served alone, on processes of its own; leave out {_said(given[0])}")
    if former is Batching.ORLOJ:
        raise FluidTuneError('batching="orloj" is for whole models; leave it or stages out')
    return Batching.WINDOW


def _start(setting: Setting, host: str, port: int) -> None:
    """Start the front, and wait until it serves. Raises FluidTuneError if it cannot; nothing is left then."""
    from fluidtune.serving.front_actor import FrontActor

    options = {"name": APP, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1}
    placed = {"num_cpus": 0, "resources": HEAD, "max_concurrency": CALLS}
    kept = f"setting-{secrets.token_hex(8)}"
    kept_state.keep(kept, cloudpickle.dumps(setting))
    try:
        front = ray.remote(FrontActor).options(**options, **placed).remote(kept, host, port)
    except ValueError as error:  # Somebody else was faster.
        kept_state.forget(kept)
        raise FluidTuneError(f"this Ray cluster serves trials already ({error})") from None
    try:
        _wait(front)
    except BaseException as error:
        _end(front)
        kept_state.forget(kept)
        if isinstance(error, FluidTuneError) or not isinstance(error, Exception):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise FluidTuneError(f"the front did not start: {said}") from error


def _held(setting: Setting) -> Setting:
    """With a copy of the checkpoint of a trial that goes on. Raises FluidTuneError if there is none to be had."""
    try:
        trials = tuple(held(one, setting.run, one.checkpoint.filesystem) for one in setting.loading.trials)
    except ServeError as error:
        raise FluidTuneError(str(error)) from None
    return replace(setting, loading=replace(setting.loading, trials=trials))


def _wait(front: Any) -> None:
    told = False
    while (found := ray.get(front.status.remote(), timeout=START_S))["state"] != "serving":
        if found["state"] == "failed":
            raise FluidTuneError(found["why"])
        if found["state"].startswith("waiting") and found["seconds"] > PATIENT_S and not told:
            logger.warning("FluidTune: the service is %s; fluidtune arbiter status says who has them", found["state"])
            told = True
        time.sleep(LOOK_S)


def status() -> dict[str, Any]:
    """What is served in this Ray cluster, and what became of the requests. Raises FluidTuneError if nothing is."""
    return _told("status")


def picture(path: str) -> Path:
    """Draw the batches of the last minute over devices as a PNG. Raises FluidTuneError if nothing is served."""
    from fluidtune.report.serving_report import Batch, batches_png
    from fluidtune.serving.watching import MINUTE_S

    batches = [Batch(*one) for one in _told("minute")]
    devices = max(status()["devices"], *(one.device + 1 for one in batches), 1)
    return batches_png(batches, devices, MINUTE_S, path)


def deploy(
    results: ResultGrid | str | Path,
    trial: str | None = None,
    canary: float = 1.0,
    metric: str | None = None,
    mode: str | None = None,
) -> dict[str, Any]:
    """As `Served.deploy`."""
    if not isinstance(canary, Real) or not 0 < canary <= 1:
        raise FluidTuneError(f"canary is {canary!r}, expected the part of the requests, above 0 and at most 1")
    winner = winners(results, 1, metric, mode)[0] if trial is None else winner_named(results, trial, metric)
    # What is copied first takes as long as to load it.
    wait_s = LOAD_S if winner.goes_on else ANSWER_S
    number = _told("deploy", winner, run_directory(results), float(canary), wait_s=wait_s)
    until = time.monotonic() + START_S
    while True:
        time.sleep(LOOK_S)
        try:
            found = {one["version"]: one for one in status()["trials"]}
        except FluidTuneError:  # The front may be starting anew.
            if time.monotonic() > until:
                raise
            continue
        until = time.monotonic() + START_S
        version = found.get(number)
        if version is None:
            raise FluidTuneError(f"version {number} was given up, as the front was restarted; deploy it again")
        if version["state"] in ("refused", "ended"):
            why = version["why"] or "it was rolled back"
            raise FluidTuneError(f"version {number} (trial {winner.name}) does not serve: {why}")
        if version["state"] not in ("loading", "measuring"):
            return version


def promote() -> None:
    """As `Served.promote`."""
    _told("promote", wait_s=HUNG_S + ANSWER_S)


def rollback() -> None:
    """As `Served.rollback`."""
    _told("rollback", wait_s=HUNG_S + ANSWER_S)


def _told(method: str, *given: Any, wait_s: float = ANSWER_S) -> Any:
    front = _front()
    if front is None:
        raise FluidTuneError("nothing is served in this Ray cluster; start it with: fluidtune serve start")
    try:
        return ray.get(getattr(front, method).remote(*given), timeout=wait_s)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ServeError):  # It has understood, and says no.
            raise FluidTuneError(str(cause)) from None
        raise FluidTuneError(f"the front does not answer ({type(error).__name__}); it may be starting anew, try again")


def stop() -> bool:
    """End what `serve` has started in this Ray cluster. Returns whether there was anything."""
    front = _front()
    if front is not None:
        _end(front)
    return front is not None


def status_text(found: dict[str, Any]) -> str:
    """The status for a terminal. Names and errors in it come from elsewhere."""
    why = f" ({found['why']})" if found["why"] else ""
    leased = " leased" if found["app"] else ""
    groups = found.get("stages", [])
    lines = [
        f"{found['state']}{why}: SLO {1e3 * found['slo_s']:.0f} ms, {found['devices']}{leased} devices with "
        f"{len(found['device_pids'])} processes, {found['unanswered']} requests wait, {found['seconds']:.0f} s"
    ]
    if found["devices_wanted"] not in (None, found["devices"]):
        lines.append(f"  the load wants {found['devices_wanted']} devices")
    for number, stages in enumerate(groups):
        whole = sum(one["weights"] for one in stages)
        lines += [
            f"  group {number}, stage {place}: layers {one['first']} to {one['end'] - 1}, {1e3 * one['seconds']:.1f} "
            f"ms, {one['weights'] / 1e6:.4g} of {whole / 1e6:.4g} MB of weights, {one['activations'] / 1e3:.4g} kB out"
            for place, one in enumerate(stages)
        ]
    placement = found.get("placement")
    if placement:
        lines += [f"  device {one}: {', '.join(models) or 'no model'}" for one, models in placement["devices"].items()]
        lines.append(f"  {placement['phase']}: {placement['why']}")
    for trial in found["trials"]:
        batches = {int(size): count for size, count in trial["batches"].items()}
        mean = sum(size * count for size, count in batches.items()) / max(1, sum(batches.values()))
        became = ", ".join(f"{count} {what}" for what, count in sorted(trial["requests"].items())) or "no request yet"
        alone = "not measured" if trial["batch_1_s"] is None else f"{1e3 * trial['batch_1_s']:.1f} ms alone"
        formed = f", formed by {trial['batching']}" if trial["batching"] == "orloj" else ""
        p99 = "" if trial["p99_s"] is None else f", p99 {1e3 * trial['p99_s']:.1f} ms"
        share = f" of {100 * trial['share']:g} %" if trial.get("share") else ""
        alone += f", SLO {1e3 * trial['slo_s']:.0f} ms" if "slo_s" in trial else ""
        lines += [
            f"  {trial['trial']} (version {trial['version']}, {trial['state']}{share}): {became}; {alone}, "
            f"{mean:.1f} requests in a batch{formed}",
            f"    last minute: {trial['goodput']:.1f} requests/s answered{p99}",
            *([f"    {trial['why']}"] if trial.get("why") else []),
        ]
    return "\n".join(map(printable, lines))


def loader(text: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names. Raises FluidTuneError if there is none."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise FluidTuneError(f"load {text!r} names no function; expected MODULE:FUNCTION")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise FluidTuneError(f"load {text!r}: the module cannot be imported ({error}); run this where it can be")
    except Exception as error:  # of the module's own code
        raise FluidTuneError(f"load {text!r}: module {module} fails at its import: {type(error).__name__}: {error}")
    if found is None:
        raise FluidTuneError(f"load {text!r}: module {module} has no {name}")
    if not callable(found):
        raise FluidTuneError(f"load {text!r} is a {type(found).__name__}, expected a function")
    return found


def _front() -> Any:
    """The front's actor; None: nothing is served."""
    try:
        return ray.get_actor(APP, namespace=NAMESPACE)
    except ValueError:
        return None


def _end(front: Any) -> None:
    """Have the front refuse, answer what runs, and close its port; then end it, and with it the model processes."""
    try:
        ray.get(front.stop.remote(), timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        logger.warning("the front does not answer (%s); it is ended all the same", type(error).__name__)
    ray.kill(front, no_restart=True)
    until = time.monotonic() + ANSWER_S
    while _front() is not None and time.monotonic() < until:
        time.sleep(LOOK_S / 10)


def missing() -> list[str]:
    """What of `fluidtune[serve]` is not installed."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def check_installed() -> None:
    """Raises FluidTuneError, with the command that installs it, if something of `fluidtune[serve]` is missing."""
    if missing():
        said = f"not installed: {', '.join(missing())}"
        raise FluidTuneError(f'{said}; type: pip install "fluidtune[serve]"')


def _spec(devices: str | None, cluster: Mapping[str, float]) -> DeviceSpec:
    """What ``devices`` says. By default GPUs, if there are any. Raises FluidTuneError if they cannot answer."""
    spec = DeviceSpec.parse(devices) or DeviceSpec("gpu" if cluster.get("GPU") else "cpu")
    if spec.kind == "emulated":
        raise FluidTuneError(f'devices={devices!r} compute nothing, so they cannot answer; use "cpu:N" or "gpu:N"')
    return spec


def _resources(devices: str | None, beside: bool, stages: int = 1) -> tuple[int, dict[str, float]]:
    """How many devices, each of ``stages`` processes, and Ray's options of each of these.

    Raises FluidTuneError if the cluster cannot have them.
    """
    if beside:
        if devices not in (None, "cpu:1"):
            raise FluidTuneError(f'beside=True is for devices="cpu:1", not {devices!r}; leave one of the two out')
        return BESIDE
    cluster = ray.cluster_resources()
    spec = _spec(devices, cluster)
    count, name = spec.count or stages, spec.kind.upper()
    if count % stages:
        raise FluidTuneError(f"devices={devices!r} are {count} processes; give a multiple of the {stages} stages")
    if cluster.get(name, 0) < count:
        has = f"{cluster.get(name, 0):g} {name}s"
        raise FluidTuneError(f"devices={devices!r} are {count} {name}s, and this Ray cluster has {has}; ask for fewer")
    return count // stages, OPTIONS[name]


def _leasing(devices: str | None, beside: bool, arbiter: str, run: str) -> Leasing:
    """How the service leases devices. Raises FluidTuneError if this cluster's arbiter cannot lease such ones."""
    from fluidtune.serving.model_leases import Leasing
    from themis_bridge import ThemisError
    from themis_bridge.shell import control

    if arbiter != "auto":
        raise FluidTuneError(f'arbiter={arbiter!r} is not known; use "auto", or None for devices of its own')
    if beside:
        raise FluidTuneError('beside=True shares one core by turns, and arbiter="auto" leases whole ones: choose one')
    try:
        leased = control.status()["unit"] if control.find() is not None else None
    except ThemisError:
        leased = None  # It was stopped in between.
    cluster = ray.cluster_resources()
    spec = _spec(devices, cluster) if devices is not None or leased is None else DeviceSpec(leased.lower())
    unit = spec.kind.upper()
    if leased not in (None, unit):
        said = f"devices={devices!r} are {unit}s, and the arbiter of this Ray cluster leases {leased}s"
        raise FluidTuneError(f"{said}; ask for these, or stop the arbiter first: fluidtune arbiter stop")
    if not cluster.get(unit):
        raise FluidTuneError(f"with devices={devices!r} the service leases {unit}s, and this Ray cluster has none")
    return Leasing(f"{Path(run).name}-served", user_of_job(), unit, spec.count)


def _check_free(host: str, port: int) -> None:
    if _front() is not None:
        raise FluidTuneError("this Ray cluster serves trials already; end that first with: fluidtune serve stop")
    try:
        with listening(host, port):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FluidTuneError(f"port {port} of {host} is taken; give another port")
        if error.errno != errno.EADDRNOTAVAIL:  # That may be an address of the head node, and this one another.
            raise FluidTuneError(f"cannot listen on {host}:{port}: {error}; give another host or port")

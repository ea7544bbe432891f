"""`fluidtune.serve`: checks what it is given, starts the front, and waits until that serves."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import math
import posixpath
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
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
from fluidtune.device_kinds import KINDS, asked_for
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import kept_state
from fluidtune.ray_compat.accelerators import none_visible
from fluidtune.ray_compat.cluster_address import join
from fluidtune.ray_compat.job_metadata import user_of_job
from fluidtune.report.events import SERVICE_DIRECTORY
from fluidtune.serving.address import is_of_this_machine, listening, url_of
from fluidtune.serving.capacity import one_of
from fluidtune.serving.held_checkpoints import held, let_go
from fluidtune.serving.model_process import MODEL_PROCESS, Loading
from fluidtune.serving.model_tables import Models
from fluidtune.serving.placed_models import placed_models
from fluidtune.serving.process import LOOK_S
from fluidtune.serving.running_services import NAMESPACE, START_S, RunningService, Served, check_name, known
from fluidtune.serving.setting import Following, Placing, Setting
from fluidtune.serving.winners import Winner, logged_in, ranking, run_directory, winners
from symphony_serve.errors import ServeError
from symphony_serve.model_side import Batching, StartPolicy
from symphony_serve.placement.stages import GIB

if TYPE_CHECKING:
    from fluidtune.serving.model_leases import Leasing

logger = logging.getLogger(__name__)

#: The largest batch, unless the caller says otherwise; as `measure_models`.
MAX_BATCH = 64
#: The largest number of a TCP port. Source: RFC 9293. (0, which lets the system choose, would be unknown to clients.)
MOST_PORT = 65535
#: What `fluidtune[serve]` brings.
NEEDS = ("uvicorn", "starlette", "httptools", "msgspec", "prometheus_client", "uvloop")
#: Calls of the front's actor at once: a stop does not wait behind others' status.
CALLS = 8
#: Seconds after which a start that waits for a lease says so. A free device is leased within two or three.
PATIENT_S = 5.0
#: The resource of the cluster's head node, and a part of it: the front is where clients reach the cluster. Source:
#: Ray's documentation of `ray.nodes`.
HEAD = {"node:__internal_head__": 0.001}
#: One process, whose core is the search's in Ray's books.
BESIDE: tuple[int, dict[str, float]] = (1, {"CPU": 0.0})


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
    name: str | None = None,
    user: str | None = None,
    address: str | None = None,
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
        memory: with ``models``, GiB that the models of a device take at most, at any moment. Those that have no room
            come when they are asked. Default: no limit.
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
        name: of the service, which no other one in the cluster may have. Default: that of the run's directory.
        user: whose service it is: who may stop and change it. Default: the user of this process's job.
        address: of the Ray cluster, "auto" for that of this machine. Default: the one that this process is connected
            to, or the one that Ray Tune would connect to or start.

    Needs ``fluidtune[serve]``. What is given is checked before anything connects to Ray or starts.
    Raises FluidTuneError if nothing can be served, or if the models are too slow for the SLO, with both numbers.
    """
    if models is not None:
        others = {"results": results, "load": load, "slo": slo, "metric": metric, "mode": mode, "arbiter": arbiter}
        others |= {"follow": follow, "beside": beside or None, "top": None if top == 1 else top}
        others |= {"stages": None if stages == 1 else stages, "stage_memory": stage_memory}
        for given in (name for name, value in others.items() if value is not None):
            why = "several models share no leases" if given == "arbiter" else "it is for the trials of one run"
            raise FluidTuneError(f"models and {_said(given)} do not go together: {why}; leave one of the two out")
        placing, chosen, run = _placing(models, memory, search_s)
        trials, slo = list(chosen), max(one.slo for one in placing.models)
        following, loading = None, Loading(b"", tuple(sys.path), tuple(chosen))
    elif results is None or load is None or slo is None:
        raise FluidTuneError("give results, load and slo, or models")
    elif memory is not None:
        raise FluidTuneError(f"memory is {memory!r}, and is for several models; give models, or leave it out")
    else:
        following = _following(results, top, metric, mode, follow) if follow is not None else None
        if following is not None:
            metric, mode = following.metric, following.mode
        trials = winners(results, top, metric, mode, running=follow is not None)
        placing, loading, run = None, Loading.of(load, trials, beside), run_directory(results)
    policy = _checked(slo, max_batch, max_body, port, starts, token, cors)
    if token is None and not no_token and not is_of_this_machine(host):
        remedy = "give a token, or no_token if all of them may ask (--token FILE, --no-token)"
        raise FluidTuneError(f"other machines reach host {host!r}: {remedy}")
    former = one_of(Batching, "batching", batching)
    if stages != 1 or stage_memory is not None:
        former = _in_stages(stages, stage_memory, former, top=top != 1, beside=beside, arbiter=arbiter, follow=follow)
    spec = _spec(devices, beside, arbiter, stages)
    usual = Path(run).name or "models"  # The file of the models may be in "/".
    check_name(RunningService(usual if name is None else name, user or ""), ())
    check_installed()
    if address is not None:
        if not join(address):
            raise FluidTuneError(f"there is no Ray cluster at {address}; start one with: ray start --head")
    elif not ray.is_initialized():
        start_quick_nodes()
        ray.init(log_to_driver=False)
    one = RunningService(usual if name is None else name, user_of_job(user))
    folder = SERVICE_DIRECTORY if one.name == usual else f"{SERVICE_DIRECTORY}-{one.name}"
    leasing = _leasing(spec, one) if arbiter is not None else None
    count, resources = (0, _one(leasing.unit)) if leasing is not None else BESIDE if beside else _own(spec, stages)
    on_cores = KINDS[asked_for(resources)].cores
    hidden = none_visible(dict(ray.get_runtime_context().runtime_env)) if on_cores else {}
    loading = replace(loading, environment=hidden)
    if not kept_state.can_keep():
        said = "over Ray Client a service cannot be started"
        raise FluidTuneError(f"{said}; start it in a process on the cluster, for example by `ray job submit`")
    check_name(one, known())
    _check_port(host, port)

    modules = (*listed_modules(sys.modules), MODEL_PROCESS) if fork_server else None
    where = one, host, port, run, posixpath.join(run, folder)
    setting = Setting(*where, loading, slo, resources, count, max_batch, max_body, policy, modules, leasing)
    setting = replace(setting, token=token, cors=tuple(cors), batching=former, following=following, stages=stages)
    setting = replace(setting, room=math.inf if stage_memory is None else stage_memory * GIB, placing=placing)
    setting = _held(setting)
    try:
        _start(setting)
    except BaseException:
        let_go(setting.loading.trials, setting.folder)
        raise
    return Served(one.name, one.user, url_of(host, port), [trial.name for trial in trials])


#: What the command line calls a setting that has another name there.
OPTION = {"results": "RUN_DIR", "arbiter": "--shared", "search_s": "--seconds"}


def _said(name: str) -> str:
    """A setting as whoever reads of it knows it, from the command line or from Python."""
    return f"{name} ({OPTION[name]})" if name in OPTION else name


def _placing(models: Models, memory: float | None, search_s: float) -> tuple[Placing, list[Winner], str]:
    """How the models are placed, what is loaded of each, and where the log is kept."""
    for name, value in (("memory", memory), ("search_s", search_s)):
        good = isinstance(value, Real) and not isinstance(value, bool) and 0 < value < math.inf
        if value is not None and not good:
            raise FluidTuneError(f"{_said(name)} is {value!r}, expected a number above 0")
    size = math.inf if memory is None else memory * GIB
    placed, chosen, run = placed_models(models, loader, size)
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
    return one_of(StartPolicy, "starts", starts)


def _following(
    results: ResultGrid | str | Path, top: int, metric: str | None, mode: str | None, every: float
) -> Following:
    """How the search is followed. Raises FluidTuneError if it cannot be."""
    if not isinstance(every, Real) or not 0 < every < math.inf:
        raise FluidTuneError(f"follow is {every!r}, expected seconds between two looks, above 0")
    if top != 1:
        raise FluidTuneError(f"follow is for the best trial alone, and top is {top}; leave one of the two out")
    where = run_directory(results)
    if metric is None or mode is None:
        metric, mode = ranking(logged_in(where), metric, mode)
    if metric is None or mode is None:
        raise FluidTuneError(f"{where} does not tell by which metric its trials are ranked; give metric and mode")
    return Following(float(every), metric, mode)


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


def _start(setting: Setting) -> None:
    """Start the front, and wait until it serves. Raises FluidTuneError if it cannot; nothing is left then."""
    from fluidtune.serving.front_actor import FrontActor

    one = setting.known
    options = {"name": one.actor, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1}
    placed = {"num_cpus": 0, "resources": HEAD, "max_concurrency": CALLS}
    kept = f"setting-{secrets.token_hex(8)}"
    kept_state.keep(kept, cloudpickle.dumps(setting))
    front = None
    try:
        check_name(one, known())  # To copy the checkpoints may have taken minutes.
        front = ray.remote(FrontActor).options(**options, **placed).remote(kept)
        # Of two users who start at once each sees the other's here, if not before; Ray refuses two of one user.
        check_name(one, [other for other in known() if other != one])
        _wait(front)
    except BaseException as error:
        if front is not None:
            one.stop()
        kept_state.forget(kept)
        if front is None and isinstance(error, ValueError):
            check_name(one, known())
        if isinstance(error, FluidTuneError) or not isinstance(error, Exception):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise FluidTuneError(f"the front did not start: {said}") from error


def _held(setting: Setting) -> Setting:
    """With a copy of the checkpoint of a trial that goes on. Raises FluidTuneError if there is none to be had."""
    try:
        trials = tuple(held(one, setting.folder, one.checkpoint.filesystem) for one in setting.loading.trials)
    except ServeError as error:
        raise FluidTuneError(str(error)) from None
    return replace(setting, loading=replace(setting.loading, trials=trials))


def _wait(front: Any) -> None:
    told = False
    while (found := ray.get(front.ask.remote("status"), timeout=START_S))["state"] != "serving":
        if found["state"] == "failed":
            raise FluidTuneError(found["why"])
        if found["state"].startswith("waiting") and found["seconds"] > PATIENT_S and not told:
            logger.warning("FluidTune: the service is %s; fluidtune arbiter status says who has them", found["state"])
            told = True
        time.sleep(LOOK_S)


def loader(text: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names. Raises FluidTuneError if there is none."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise FluidTuneError(f"load {text!r} names no function; expected MODULE:FUNCTION")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FluidTuneError(f"load {text!r}: the module cannot be imported ({error}); run this where it can be")
    except Exception as error:  # of the module's own code, or there is none of this name
        raise FluidTuneError(f"load {text!r}: {type(error).__name__}: {error}")
    if not callable(found):
        raise FluidTuneError(f"load {text!r} is a {type(found).__name__}, expected a function")
    return found


def missing() -> list[str]:
    """What of `fluidtune[serve]` is not installed."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def check_installed() -> None:
    """Raises FluidTuneError, with the command that installs it, if something of `fluidtune[serve]` is missing."""
    if missing():
        said = f"not installed: {', '.join(missing())}"
        raise FluidTuneError(f'{said}; type: pip install "fluidtune[serve]"')


def _spec(devices: str | None, beside: bool, arbiter: str | None, stages: int) -> DeviceSpec | None:
    """What ``devices`` says, if it says anything. Raises FluidTuneError if no cluster could have such devices."""
    spec = DeviceSpec.parse(devices)
    if arbiter not in (None, "auto"):
        raise FluidTuneError(f'arbiter={arbiter!r} is not known; use "auto", or None for devices of its own')
    if beside and arbiter is not None:
        raise FluidTuneError('beside=True shares one core by turns, and arbiter="auto" leases whole ones: choose one')
    if beside and devices not in (None, "cpu:1"):
        raise FluidTuneError(f'beside=True is for devices="cpu:1", not {devices!r}; leave one of the two out')
    if spec is not None and not KINDS[spec.kind].computes:
        raise FluidTuneError(f'devices={devices!r} compute nothing, so they cannot answer; use "cpu:N" or "gpu:N"')
    if spec is not None and spec.count is not None and spec.count % stages:
        raise FluidTuneError(f"devices={devices!r} are {spec.count} processes; give a multiple of the {stages} stages")
    return spec


def _own(spec: DeviceSpec | None, stages: int) -> tuple[int, dict[str, float]]:
    """How many devices, each of ``stages`` processes, and the resources of each of these. By default GPUs, if any.

    Raises FluidTuneError if the cluster has not as many.
    """
    cluster = ray.cluster_resources()
    spec = spec or DeviceSpec(asked_for(cluster))
    count, name = spec.count or stages, KINDS[spec.kind].resource
    if cluster.get(name, 0) < count:
        has = f"{cluster.get(name, 0):g} {name}s"
        raise FluidTuneError(f"the service asks for {count} {name}s, and this Ray cluster has {has}; ask for fewer")
    return count // stages, _one(name)


def _one(resource: str) -> dict[str, float]:
    """What a model process asks for, by Ray's names: one device, and no core beside it."""
    return {"CPU": 0.0, resource: 1.0}


def _leasing(spec: DeviceSpec | None, service: RunningService) -> Leasing:
    """How the service leases devices. Raises FluidTuneError if this cluster's arbiter cannot lease such ones."""
    from fluidtune.serving.model_leases import Leasing
    from themis_bridge import ThemisError
    from themis_bridge.shell import control

    try:
        leased = control.status()["unit"] if control.find() is not None else None
    except ThemisError:
        leased = None  # It was stopped in between.
    cluster = ray.cluster_resources()
    unit = leased if leased and spec is None else KINDS[spec.kind if spec else asked_for(cluster)].resource
    if leased not in (None, unit):
        said = f"devices are to be {unit}s, and the arbiter of this Ray cluster leases {leased}s"
        raise FluidTuneError(f"{said}; ask for these, or stop the arbiter first: fluidtune arbiter stop")
    if not cluster.get(unit):
        raise FluidTuneError(f"the service leases {unit}s, and this Ray cluster has none; give other devices")
    return Leasing(f"{service.name}-served", service.user, unit, spec.count if spec is not None else None)


def _check_port(host: str, port: int) -> None:
    try:
        with listening(host, port):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FluidTuneError(f"port {port} of {host} is taken; give another port")
        if error.errno != errno.EADDRNOTAVAIL:  # That may be an address of the head node, and this one another.
            raise FluidTuneError(f"cannot listen on {host}:{port}: {error}; give another host or port")

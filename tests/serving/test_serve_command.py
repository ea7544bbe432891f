"""What `fluidtune serve` reads and prints, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.cluster.devices.layout import DeviceSpec
from fluidtune.commands import serve as serve_words
from fluidtune.errors import FluidTuneError
from fluidtune.serving import running_services, service
from fluidtune.serving.running_services import status_text
from fluidtune.serving.service import loader, serve
from tests.serving import runs
from themis_bridge.shell import control

HERE = "tests.serving.runs"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs", "names no function; expected MODULE:FUNCTION"),
        ("no_such_module:load", "cannot be imported .*no_such_module.*; run this where it can be"),
        (f"{HERE}:lod", "module 'tests.serving.runs' has no attribute 'lod'"),
        (f"{HERE}:KILLS", "is a int, expected a function"),
    ],
)
def test_functions_that_are_not_there(text, said):
    with pytest.raises(FluidTuneError, match=said):
        loader(text)


def test_without_what_serving_needs_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(service, "NEEDS", ("no_such_module", "json"))
    monkeypatch.setattr(service, "winners", lambda *given, **named: [])
    with pytest.raises(FluidTuneError, match=r'not installed: no_such_module; type: pip install "fluidtune\[serve\]"'):
        serve("run", runs.load, 1.0)


def test_over_ray_client_one_line_says_where_a_service_is_started(monkeypatch):
    """Seen: `fluidtune.serve` ended with an AttributeError there."""
    monkeypatch.setattr(service, "winners", lambda *given, **named: [])
    monkeypatch.setattr(service, "NEEDS", ())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    monkeypatch.setattr(service.kept_state, "global_worker", SimpleNamespace())  # as in a client
    with pytest.raises(FluidTuneError, match="over Ray Client a service cannot be started; start it in a process on"):
        serve("run", runs.load, 1.0)
    # Seen: a service of several models of a file in "/" had no name, and was refused for that.
    monkeypatch.setattr(service.kept_state, "can_keep", lambda: True)
    monkeypatch.setattr(service, "known", lambda: [running_services.RunningService("models", "bert")])
    placed = SimpleNamespace(models=[SimpleNamespace(slo=1.0)])
    monkeypatch.setattr(service, "_placing", lambda *given: (placed, [], "/"))
    with pytest.raises(FluidTuneError, match="'models' already, of user bert"):
        serve(models="models.toml", user="anna")


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (TimeoutError(), "^the front did not start: TimeoutError$"),
        (RuntimeError("no\nsuch thing"), "^the front did not start: such thing$"),
        ([running_services.RunningService("digits", "bert")], "'digits' already, of user bert; give another name"),
    ],
)
def test_what_is_said_of_a_start_that_fails_is_one_line_and_nothing_is_left(monkeypatch, seen, said):
    """Of what is seen by the second look at the services: an error, or another user's service that began meanwhile."""
    kept: dict[str, bytes] = {}
    stopped: list[running_services.RunningService] = []
    monkeypatch.setattr(service.kept_state, "keep", kept.__setitem__)
    monkeypatch.setattr(service.kept_state, "forget", kept.pop)
    monkeypatch.setattr(ray, "remote", Mock())
    monkeypatch.setattr(service, "known", Mock(side_effect=[[], seen]))
    monkeypatch.setattr(running_services.RunningService, "stop", lambda one: stopped.append(one))
    one = running_services.RunningService("digits", "anna")
    with pytest.raises(FluidTuneError, match=said):
        service._start(SimpleNamespace(known=one))
    assert not kept and stopped == [one]


GIVEN = {"results": "run", "load": runs.load, "slo": 1.0}
BESIDE = GIVEN | {"beside": True}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give results, load and slo, or models"),
        (GIVEN | {"slo": 0.0}, "slo is 0.0, expected seconds above 0"),
        (GIVEN | {"slo": float("inf")}, "slo is inf, expected"),
        (GIVEN | {"slo": "0.2"}, "slo is '0.2', expected"),
        (GIVEN | {"max_batch": 2.5}, "max_batch is 2.5, expected 1 or more"),
        (GIVEN | {"max_body": 0}, "max_body is 0, expected bytes, 1 or more"),
        (GIVEN | {"port": 0}, "port is 0, expected one of 1 to 65535"),
        (GIVEN | {"port": "8000"}, "port is '8000', expected"),
        (GIVEN | {"starts": "soon"}, "starts is 'soon', expected deferred or eager"),
        (GIVEN | {"batching": "big"}, "batching is 'big', expected"),
        (GIVEN | {"token": "short"}, "token is too short"),
        (GIVEN | {"cors": "x"}, "cors is 'x', expected a list of origins"),
        (GIVEN | {"name": "a/b"}, "name is 'a/b', expected printable characters without '/'"),
        (GIVEN | {"memory": 1.0}, "memory is 1.0, and is for several models"),
        (GIVEN | {"host": "0.0.0.0"}, "other machines reach host '0.0.0.0': give a token, or no_token"),
        (GIVEN | {"devices": "tpu:1"}, "devices='tpu:1' is not a device setting"),
        (GIVEN | {"devices": "emulated:2"}, "devices='emulated:2' compute nothing, so they cannot answer"),
        (GIVEN | {"devices": "cpu:3", "stages": 2}, "devices='cpu:3' are 3 processes; give a multiple of the 2 stages"),
        (GIVEN | {"arbiter": "always"}, "arbiter='always' is not known; use \"auto\", or None"),
        (GIVEN | {"stages": 0}, "stages is 0, expected a number of processes, 1 or more"),
        (GIVEN | {"stages": 2, "stage_memory": 0.0}, "stage_memory is 0.0, expected GiB above 0 of each of several"),
        (GIVEN | {"stage_memory": 1.0}, "stage_memory is 1.0, expected GiB above 0 of each of several stages"),
        (GIVEN | {"stages": 2, "batching": "orloj"}, 'batching="orloj" is for whole models; leave it or stages out'),
        (GIVEN | {"stages": 2, "arbiter": "auto"}, "on processes of its own; leave out arbiter (--shared)"),
        (BESIDE | {"arbiter": "auto"}, 'beside=True shares one core by turns, and arbiter="auto" leases whole ones'),
        (BESIDE | {"devices": "cpu:2"}, "beside=True is for devices=\"cpu:1\", not 'cpu:2'; leave one of the two out"),
        (["."], "give RUN_DIR, --load and --slo, or --models FILE"),
        ([".", "--load", f"{HERE}:load", "--slo", "1", "--gpus", "2"], "--gpus 2 is for --models"),
        ([".", "--load", f"{HERE}:load", "--slo", "1", "--beside", "--shared"], "leases whole ones: choose one"),
        ([".", "--load", f"{HERE}:load", "--slo", "1", "--devices", "x"], "devices='x' is not a device setting"),
        ([".", "--load", f"{HERE}:load", "--slo", "1", "--memory", "2"], "--gpu-memory 2.0 is for --models FILE"),
        (["--models", "none.toml", "--gpus", "2", "--devices", "gpu:2"], "--gpus 2 is in place of --devices"),
        (["--models", "none.toml", "--gpus", "2"], "the file of models 'none.toml' cannot be read"),
    ],
)
def test_what_is_wrong_is_said_before_anything_connects_to_ray(monkeypatch, given, said):
    """As keywords of `fluidtune.serve`, and as words of the command. Seen: a cluster was started for "tpu:1"."""
    monkeypatch.setattr(service, "winners", lambda *given, **named: [])
    for name in ("init", "is_initialized"):
        monkeypatch.setattr(ray, name, lambda *given, **named: pytest.fail("it connects to Ray"))
    monkeypatch.setattr(service, "join", ray.init)
    with pytest.raises(FluidTuneError) as refused:
        if isinstance(given, dict):
            serve(**given)
        else:
            CliRunner().invoke(cli, ["serve", "start", *given], catch_exceptions=False)
    assert said in str(refused.value)


FOUND = {
    "state": "serving",
    "why": "",
    "slo_s": 0.2,
    "name": "digits",
    "user": "anna",
    "url": "http://x:1/",
    "device_pids": [7],
    "processes_wanted": 2,
    "devices": 2,
    "unanswered": 1,
    "devices_wanted": 3,
    "app": None,
    "seconds": 9.0,
}
TRIAL = {
    "trial": "a",
    "version": 1,
    "state": "serving",
    "batching": "window",
    "batch_1_s": 0.002,
    "goodput": 2.5,
    "p99_s": 0.012,
    "requests": {"answered": 3, "late": 1},
    "batches": {"2": 2},
}


def test_the_status_in_words():
    assert status_text({**FOUND, "trials": [TRIAL]}).splitlines() == [
        "digits, of user anna, at http://x:1/",
        "serving: SLO 200 ms, 2 devices with 1 of 2 processes, 1 request waiting, 9 s",
        "  the load wants 3 devices",
        "  a (version 1, serving): 3 answered, 1 late; 2.0 ms alone, 2.0 requests in a batch",
        "    last minute: 2.5 requests/s answered, p99 12.0 ms",
    ]
    canary = {**TRIAL, "version": 2, "state": "canary", "share": 0.1, "p99_s": None}
    refused = {**TRIAL, "version": 3, "state": "refused", "why": "it is slow"}
    lines = status_text({**FOUND, "trials": [canary, refused]}).splitlines()
    assert lines[3].startswith("  a (version 2, canary of 10 %): 3 answered")
    assert (lines[4], lines[-1]) == ("    last minute: 2.5 requests/s answered", "    it is slow")
    leased = {**FOUND, "app": "run-served", "devices_wanted": 2, "trials": []}
    assert "2 leased devices with 1 of 2 processes" in status_text(leased)
    # Seen: a KeyError, as the service was started by an earlier revision, which counts no loads.
    earlier = {"devices": {"0": ["a"]}, "phase": "settled", "why": "it starts"}
    assert status_text({**FOUND, "placement": earlier, "trials": []}).endswith("\n  device 0: a\n  settled: it starts")


NAME, SHOWN = "[/x] \x1b[2J \x9b2J \n  it is fine \ud83d", r"[/x] \x1b[2J \x9b2J \n  it is fine \ud83d"


@pytest.mark.parametrize("command", ["status", "deploy", "rollback", "start"])
def test_names_and_errors_of_a_service_are_shown_as_they_are(monkeypatch, command):
    """Seen: a model's name or error could clear the terminal, or add a line."""
    trial = TRIAL | dict.fromkeys(("trial", "state", "why", "batching"), NAME) | {"requests": {NAME: 1}}
    placement = {"devices": {"0": [NAME]}, "loads": {NAME: 1}, "phase": NAME, "why": NAME}
    found = FOUND | dict.fromkeys(("state", "why", "name", "user", "url"), NAME)
    found |= {"placement": placement, "trials": [trial], "log": None}
    served = SimpleNamespace(trials=[NAME], url="http://127.0.0.1:8000/", status=lambda: found, name=NAME)
    served.deploy, served.rollback = lambda run, **asked: trial, lambda: None
    monkeypatch.setattr(serve_words, "connect", lambda address: None)
    monkeypatch.setattr(running_services, "find", lambda *given: served)
    monkeypatch.setattr(service, "serve", lambda *given, **named: served)
    words = {"deploy": ["run"], "start": ["run", "--load", f"{HERE}:load", "--slo", "1"]}.get(command, [])
    done = CliRunner().invoke(cli, ["serve", command, *words])
    assert done.exit_code == 0, done.exception
    assert SHOWN in done.stdout and not set("\x1b\x9b\ud83d") & set(done.stdout)
    assert not any(line.startswith("  it is fine") for line in done.stdout.splitlines())


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of four CPUs and two GPUs. ``unit``: what its arbiter leases; None: there is none."""
    found = SimpleNamespace(unit=None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    monkeypatch.setattr(control, "find", lambda: found.unit)
    monkeypatch.setattr(control, "status", lambda: {"unit": found.unit})
    return found


ONE = running_services.RunningService("digits", "anna")
CPU, GPU = DeviceSpec("cpu"), DeviceSpec("gpu", 2)


@pytest.mark.parametrize(
    ("unit", "devices", "leased"),
    [
        (None, None, ("GPU", None)),
        (None, CPU, ("CPU", None)),
        ("CPU", None, ("CPU", None)),
        ("GPU", GPU, ("GPU", 2)),
        ("GPU", CPU, "devices are to be CPUs, and the arbiter of this Ray cluster leases GPUs"),
    ],
)
def test_a_service_leases_what_the_arbiter_leases(cluster, unit, devices, leased):
    cluster.unit = unit
    if isinstance(leased, str):
        with pytest.raises(FluidTuneError, match=leased):
            service._leasing(devices, ONE)
    else:
        found = service._leasing(devices, ONE)
        assert (found.app, found.user, found.unit, found.most) == ("digits-served", "anna", *leased)


def test_leases_of_what_the_cluster_has_not(cluster, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(FluidTuneError, match="the service leases GPUs, and this Ray cluster has none"):
        service._leasing(GPU, ONE)


def test_what_is_printed_acts_on_the_same_service(monkeypatch):
    """Seen: pasted, `fluidtune serve rollback` was of another service, or of none."""
    served = SimpleNamespace(name="two digits", promote=lambda: None)
    monkeypatch.setattr(serve_words, "connect", lambda address: None)
    monkeypatch.setattr(running_services, "find", lambda *given: served)
    said = CliRunner().invoke(cli, ["serve", "--user", "anna", "promote"]).stdout
    assert said.endswith(": fluidtune serve --user anna rollback --name 'two digits'\n")


def test_a_trial_that_is_named_is_not_ranked():
    found = CliRunner().invoke(cli, ["serve", "deploy", ".", "--trial", "a", "--mode", "max"])
    assert isinstance(found.exception, FluidTuneError) and "--mode max ranks trials" in str(found.exception)

"""What `fluidtune serve` reads and prints, which service somebody means, and where one listens. Without Ray."""

from __future__ import annotations

import errno
import socket
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import ray
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.cluster.devices.layout import DeviceSpec
from fluidtune.commands import serve as serve_words
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import kept_state
from fluidtune.serving import running_services, service
from fluidtune.serving.address import is_of_this_machine, listening, url_of
from fluidtune.serving.model_layers import Stage
from fluidtune.serving.running_services import RunningService, check_name, chosen, known, status_text
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


def test_without_what_serving_needs_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.setattr(ray, "init", None)  # it is said before Ray is started
    with pytest.raises(FluidTuneError, match=r'not installed: .*uvloop; type: pip install "fluidtune\[serve\]"'):
        serve(models=[{"name": "a", "checkpoint": str(tmp_path), "load": runs.load, "slo": 1.0, "rate": 1.0}])


@pytest.mark.serve
def test_over_ray_client_one_line_says_where_a_service_is_started(monkeypatch, tmp_path):
    """Seen: `fluidtune.serve` ended with an AttributeError there.

    Seen: a service of several models of a file in "/" had no name, and was refused for that.
    """
    monkeypatch.chdir("/")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    monkeypatch.delattr(kept_state.global_worker, "gcs_client", raising=False)  # as in a client
    model = {"name": "a", "checkpoint": str(tmp_path), "load": runs.load, "slo": 1.0, "rate": 1.0}
    with pytest.raises(FluidTuneError, match="over Ray Client a service cannot be started; start it in a process on"):
        serve(models=[model])


ANNAS, BERTS, OTHER = (RunningService(*one) for one in (("digits", "anna"), ("faces", "bert"), ("digits", "bert")))


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (TimeoutError(), "^the front did not start: TimeoutError$"),
        (RuntimeError("no\nsuch thing"), "^the front did not start: such thing$"),
        ([{"name": OTHER.actor, "namespace": "fluidtune"}], "'digits' already, of user bert; give another name"),
    ],
)
def test_what_is_said_of_a_start_that_fails_is_one_line_and_nothing_is_left(monkeypatch, kept, seen, said):
    """Of what is seen by the second look at the services: an error, or another user's service that began meanwhile."""
    stopped = Mock(side_effect=ValueError)
    monkeypatch.setattr(ray, "remote", Mock())
    monkeypatch.setattr(ray, "get_actor", stopped)
    monkeypatch.setattr(ray.util, "list_named_actors", Mock(side_effect=[[], seen]))
    with pytest.raises(FluidTuneError, match=said):
        service._start(SimpleNamespace(known=ANNAS))
    assert not kept and stopped.call_args.args == (ANNAS.actor,)


GIVEN = {"results": "run", "load": runs.load, "slo": 1.0}
BESIDE, SEVERAL = GIVEN | {"beside": True}, {"models": "none.toml"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give results, load and slo, or models"),
        (GIVEN | {"slo": float("inf")}, "slo is inf, expected"),
        (GIVEN | {"results": __file__, "follow": 1.0, "metric": "m", "mode": "max", "slo": 0.0}, "slo is 0.0, expe"),
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
        (GIVEN | {"follow": 0.0}, "follow is 0.0, expected seconds between two looks"),
        (GIVEN | {"follow": 1.0, "top": 2}, "follow is for the best trial alone, and top is 2"),
        (GIVEN | {"follow": 1.0}, "does not tell by which metric its trials are ranked"),
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
        (SEVERAL | {"follow": 1.0}, "models and follow do not go together: it is for the trials of one run"),
        (SEVERAL | {"arbiter": "auto"}, "models and arbiter (--shared) do not go together: several models share no le"),
        (SEVERAL | {"top": 2}, "models and top do not go together"),
        (SEVERAL | {"stages": 2}, "models and stages do not go together"),
        (SEVERAL | {"memory": 0.0}, "memory is 0.0, expected a number above 0"),
        (SEVERAL | {"memory": True}, "memory is True, expected a number above 0"),
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
    stages = [Stage(0, 2, 0.0125, 3_000_000, 4096)._asdict(), Stage(2, 5, 0.01, 1_000_000, 12)._asdict()]
    assert status_text({**FOUND, "trials": [], "stages": [stages]}).splitlines()[-2:] == [
        "  group 0, stage 0: layers 0 to 1, 12.5 ms, 3 of 4 MB of weights, 4.096 kB out",
        "  group 0, stage 1: layers 2 to 4, 10.0 ms, 1 of 4 MB of weights, 0.012 kB out",
    ]
    # Seen: a KeyError, as the service was started by an earlier revision, which counts no loads.
    earlier = {"devices": {"0": ["a"]}, "phase": "settled", "why": "it starts"}
    assert status_text({**FOUND, "placement": earlier, "trials": []}).endswith("\n  device 0: a\n  settled: it starts")


NAME, SHOWN = "[/x] \x1b[2J \x9b2J \n  it is fine \ud83d", r"[/x] \x1b[2J \x9b2J \n  it is fine \ud83d"


@pytest.fixture
def prints(monkeypatch):
    """What the command prints that finds or starts this service."""

    def run(served, *words):
        monkeypatch.setattr(serve_words, "connect", lambda address: None)
        monkeypatch.setattr(running_services, "find", lambda *given: served)
        monkeypatch.setattr(service, "serve", lambda *given, **named: served)
        done = CliRunner().invoke(cli, ["serve", *words])
        assert done.exit_code == 0, done.exception
        return done.stdout

    return run


@pytest.mark.parametrize("command", ["status", "deploy run", "rollback", f"start run --load {HERE}:load --slo 1"])
def test_names_and_errors_of_a_service_are_shown_as_they_are(prints, command):
    """Seen: a model's name or error could clear the terminal, or add a line."""
    trial = TRIAL | dict.fromkeys(("trial", "state", "why", "batching"), NAME) | {"requests": {NAME: 1}}
    placement = {"devices": {"0": [NAME]}, "loads": {NAME: 1}, "phase": NAME, "why": NAME}
    found = FOUND | dict.fromkeys(("state", "why", "name", "user", "url"), NAME)
    found |= {"placement": placement, "trials": [trial], "log": None}
    served = SimpleNamespace(trials=[NAME], url="http://127.0.0.1:8000/", status=lambda: found, name=NAME)
    served.deploy, served.rollback = lambda run, **asked: trial, lambda: None
    said = prints(served, *command.split())
    assert SHOWN in said and not set("\x1b\x9b\ud83d") & set(said)
    assert not any(line.startswith("  it is fine") for line in said.splitlines())


def test_what_is_printed_acts_on_the_same_service(prints):
    """Seen: pasted, `fluidtune serve rollback` was of another service, or of none."""
    served = SimpleNamespace(name="two digits", promote=lambda: None)
    said = prints(served, "--user", "anna", "promote")
    assert said.endswith(": fluidtune serve --user anna rollback --name 'two digits'\n")


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of four CPUs and two GPUs. ``unit``: what its arbiter leases; None: there is none."""
    found = SimpleNamespace(unit=None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    monkeypatch.setattr(control, "find", lambda: found.unit)
    monkeypatch.setattr(control, "status", lambda: {"unit": found.unit})
    return found


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
            service._leasing(devices, ANNAS)
    else:
        found = service._leasing(devices, ANNAS)
        assert (found.app, found.user, found.unit, found.most) == ("digits-served", "anna", *leased)


def test_leases_of_what_the_cluster_has_not(cluster, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(FluidTuneError, match="the service leases GPUs, and this Ray cluster has none"):
        service._leasing(GPU, ANNAS)


def test_a_trial_that_is_named_is_not_ranked():
    found = CliRunner().invoke(cli, ["serve", "deploy", ".", "--trial", "a", "--mode", "max"])
    assert isinstance(found.exception, FluidTuneError) and "--mode max ranks trials" in str(found.exception)


@pytest.mark.parametrize(
    ("there", "name", "user", "changes", "found"),
    [
        ([ANNAS, BERTS], None, "anna", True, ANNAS),
        ([ANNAS], None, "bert", False, ANNAS),
        ([ANNAS, BERTS], "faces", "anna", False, BERTS),
        ([], None, "anna", False, "nothing is served in this Ray cluster; start it with: fluidtune serve start"),
        ([ANNAS], "face", "anna", False, r"has no service 'face'; it has digits \(user anna\)"),
        ([ANNAS, BERTS], None, "carl", False, r"several services; give .* digits \(user anna\), faces \(user bert\)"),
        ([ANNAS], None, "bert", True, "service 'digits' is of user anna, and you are bert; .* serve --user anna"),
    ],
)
def test_which_service_is_meant(there, name, user, changes, found):
    if isinstance(found, RunningService):
        assert chosen(there, name, user, changes) == found
    else:
        with pytest.raises(FluidTuneError, match=found):
            chosen(there, name, user, changes)


def test_actors_of_other_names_are_no_services(monkeypatch):
    """Seen: the front of an older version, which is called "serving", made every command a traceback."""
    named = [{"name": name, "namespace": "fluidtune"} for name in ("serving", "arbiter", ANNAS.actor)]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: named)
    assert known() == [ANNAS]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (ANNAS, "of user anna; .* or end that one first: fluidtune serve --user anna stop --name digits$"),
        (OTHER, r"'digits' already, of user anna; give another name \(--name\)$"),
        (RunningService("a/b", "bert"), "name is 'a/b', expected printable characters without '/'"),
    ],
)
def test_a_name_that_a_service_cannot_have(one, said):
    with pytest.raises(FluidTuneError, match=said):
        check_name(one, [ANNAS, BERTS])


@pytest.mark.parametrize(
    ("host", "url", "alone"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/", True),
        ("localhost", "http://127.0.0.1:8000/", True),
        ("0.0.0.0", "http://127.0.0.1:8000/", False),
        ("::1", "http://[::1]:8000/", True),
        ("::", "http://127.0.0.1:8000/", False),
        ("head.example", "http://head.example:8000/", False),
    ],
)
def test_the_url_of_a_host_and_whether_others_reach_it(host, url, alone):
    assert url_of(host, 8000) == url and is_of_this_machine(host) == alone
    # Seen: of a service on "::" other machines were told [::1].
    assert url_of(host, 8000, "fd00::7") == ("http://[fd00::7]:8000/" if host in ("::", "0.0.0.0") else url)
    assert httpx.URL(url_of(host, 8000)).port == 8000


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_host_of_ipv6_is_tried_as_one(monkeypatch, host, family):
    """Seen: `fluidtune serve start --host ::1` was always refused."""
    tried = []

    def create_server(address, *, family=socket.AF_INET, **given):
        tried.append(family)
        raise OSError(errno.EADDRINUSE, "taken")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(FluidTuneError, match=f"port 8000 of {host} is taken"):
        service._check_port(host, 8000)
    assert tried == [family]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_what_listens_is_reached_at_the_url(host):
    with listening(host, 0) as opened:
        url = httpx.URL(url_of(host, opened.getsockname()[1]))
        socket.create_connection((url.host, url.port)).close()

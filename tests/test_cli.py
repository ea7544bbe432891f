"""The `fluidtune` command as a user types it: exit codes, and errors in one line."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from fluidtune import __version__
from fluidtune.cli import cli
from fluidtune.cluster.forks import quick_nodes
from fluidtune.commands.words import device_counts
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import cluster_address
from fluidtune.report.pictures import REPORT_FILES
from tests.report.makers import random_run, written
from themis_bridge import ThemisError
from themis_bridge.settings import Settings
from themis_bridge.shell import control

ROOT = Path(__file__).parents[1]


def fluidtune(*args: str, cwd: Path = ROOT, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, "-m", "fluidtune", *args]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def refused(*args: str, mentions: str, cwd: Path = ROOT) -> None:
    done = fluidtune(*args, cwd=cwd)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fluidtune: ")]
    assert len(lines) == 1 and mentions in lines[0], done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_version_and_help() -> None:
    assert __version__ in fluidtune("--version").stdout
    text = fluidtune("run", "--help").stdout
    assert "--devices" in text and "--max-packing" in text and "--max-workers" in text


@pytest.mark.parametrize(
    "words, mentions",
    [
        ("run nowhere.py", "'nowhere.py'"),
        ("run --devices cpu:0 script.py", "devices='cpu:0'"),
        ("run --devices cpu:2 --max-workers 3 script.py", "max_workers=3"),
        ("run --devcies gpu:1 script.py", "there is no option --devcies; did you mean --devices?"),
        ("--devcies gpu:1 script.py", "there is no option --devcies; did you mean fluidtune run --devices?"),
        (
            "run --devices cpu:1 --name 3 script.py",
            "--name; did you mean --lanes? Or: an option of the script goes aft",
        ),
        ("run neither.py", "without calling ray.tune.run or ray.tune.Tuner"),
        ("why nowhere t", "there is no directory 'nowhere'; there are runs in "),
        ("why run x", "there is no trial 'x'; the run has 3: train_4f2e1_00000, train_4f2e1_00001, train_4f2e1_00002"),
        ("why served t", "the log of a service"),
        ("why run/x/y t", "there is no directory 'run/x/y'; 'run/x' has no runs"),
        ("report .", "there is no event log in the directory '.'; there are runs in "),
        ("top no_event_log", "is not a FluidTune event log: line 1"),
        ("report no_event_log", "is not a FluidTune event log: line 1"),
        ("report served --html page.html", "served is the log of a service; give the run that it serves"),
        ("top --json served", "served is the log of a service; type: fluidtune serve status --json"),
        ("view run --port 70000", "port 70000 cannot be had: it is no port; give another --port"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(words: str, mentions: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('the script was run')\n")
    (tmp_path / "neither.py").write_text("from ray import tune\ntune.Tuner(lambda config: None)\nraise SystemExit")
    written(tmp_path / "run", random_run(1, devices=1, trials=3))
    written(tmp_path / "served", [{"t": 1.0, "event": "serving_started", "trials": ["t"]}])
    written(tmp_path / "no_event_log", []).write_text("no event\n")
    refused(*words.split(), mentions=mentions, cwd=tmp_path)


def test_an_event_that_lacks_something_and_half_a_character_are_no_traceback(tmp_path: Path) -> None:
    """Seen: `report`, `top`, `why` and `plan` ended with a traceback where an event lacked a field."""
    events = random_run(1, devices=1, trials=3)
    lacking = next(place for place, event in enumerate(events) if event["event"] == "trial_started")
    del events[lacking]["share"]
    end = next(event for event in events if event["event"] == "trial_ended")
    end |= {"ending": "failed", "reason": "half \ud83d"}
    written(tmp_path, events)
    with written(tmp_path / "served", [{"t": 1.0, "event": "serving_started", "trials": []}]).open("a") as log:
        log.write("{\n")
    told = {
        "report served": fluidtune("report", "served", cwd=tmp_path),
        "top served": fluidtune("top", "served", cwd=tmp_path),
        "report": fluidtune("report", ".", "--html", "page.html", cwd=tmp_path),
        "top": fluidtune("top", ".", cwd=tmp_path),
        "why": fluidtune("why", ".", end["trial"], cwd=tmp_path),
        "plan": fluidtune("plan", ".", "--devices", "1", cwd=tmp_path),
    }
    for command, done in told.items():
        assert done.returncode == 0 and "Traceback" not in done.stderr, (command, done.stderr)
        assert "1 line left out: broken, or of another version" in done.stdout, command
    assert "half \\ud83d" in told["why"].stdout
    assert "unreadable" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("words", ["top .", "why . 1", "plan . --devices 1", "trial stop . 1"])
def test_an_answer_for_a_program_has_the_keys_of_the_page_for_agents(words: str, tmp_path: Path) -> None:
    def keys(row: str) -> set[str]:
        said = re.search(rf"^\| {row}.*?` \| (.*) \|$", (ROOT / "docs/agents.md").read_text(), re.MULTILINE)
        assert said is not None
        return set(re.findall(r"`(\w+)`", re.split("[;:]", re.sub(r"\(.*?\)", "", said[1]))[0]))

    written(tmp_path, random_run(1, devices=1, trials=3))
    found = json.loads(fluidtune(*words.split(), "--json", cwd=tmp_path).stdout)
    assert found.keys() == keys(f"`{words.split()[0]} ") | {"version"} and found["version"] == 1
    assert words != "top ." or found["trials"][0].keys() == keys("its `trials")


def test_a_terminal_waits_for_a_run_that_begins(tmp_path: Path) -> None:
    """Seen: a second terminal right after the start of a search ended with "there is no event log"."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "fluidtune", "top", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=there, stderr=there, env={**os.environ, "PYTHONPATH": str(ROOT)}) as shown:
        said = b""
        while b"it is waited for" not in said.replace(b"\r\n", b" "):
            said += os.read(here, 10_000)
        written(tmp_path / "run", random_run(1, devices=1, trials=3))
        while b"3 stopped" not in said:
            said += os.read(here, 10_000)
        assert shown.wait(60) == 0


@pytest.mark.parametrize("command", ["report", "top", "view", "why"])
def test_a_log_that_may_not_be_read_is_one_line(command: str, tmp_path: Path) -> None:
    # The kernel lets nobody read the beginning of this file, and tests may run as root.
    trial = ["t"] if command == "why" else []
    refused(command, "/proc/self/mem", *trial, mentions="/proc/self/mem cannot be read: ", cwd=tmp_path)
    refused(command, "x" * 300, *trial, mentions="x cannot be read: File name too long", cwd=tmp_path)


def _invoke(monkeypatch: pytest.MonkeyPatch, *args: str) -> Any:
    """Run `fluidtune arbiter` in this process as on a cluster. Returns the exception, or None."""
    monkeypatch.setattr(cluster_address, "join", lambda address: True)
    return CliRunner().invoke(cli, ["arbiter", *args]).exception


@pytest.mark.parametrize("begins", ["ray.init()", "tune.Tuner(print).fit()"])
def test_a_search_beside_a_cluster_that_has_ended_says_so(
    begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: it waited, without a word."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    (tmp_path / "script.py").write_text(f"import ray\nfrom ray import tune\n{begins}\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused("run", "script.py", mentions=f"it has ended; delete {tmp_path}/ray/ray_current_cluster", cwd=tmp_path)


def test_a_node_without_the_clusters_token_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: twenty lines of a traceback."""

    def fails(options: tuple[str, ...]) -> None:
        raise RuntimeError(f"{options[1]}: RPC error: InvalidAuthToken: Authentication token is missing or incorrect.")

    monkeypatch.setattr(quick_nodes, "start_node", fails)
    said = CliRunner().invoke(cli, ["node", "start", "--address", "x:1"]).exception
    assert isinstance(said, FluidTuneError) and "this user has not its token: set RAY_AUTH_MODE" in str(said)


def test_the_arbiters_status_has_the_version_of_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_address, "join", lambda address: True)
    monkeypatch.setattr(control, "status", lambda: {"unit": "CPU"})
    assert json.loads(CliRunner().invoke(cli, ["arbiter", "status", "--json"]).output) == {"version": 1, "unit": "CPU"}


def test_a_page_without_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "fluidtune.view.page_server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    written(tmp_path, random_run(1, devices=1, trials=3))
    said = str(CliRunner().invoke(cli, ["view", str(tmp_path)]).exception)
    assert said == 'there is no uvicorn; for `fluidtune view` type: pip install "fluidtune[view]"'


@pytest.mark.parametrize(
    "sizes", ["\u00b2", "1,\u0663", "9" * 5000, "0" * 5000 + "1", "1000000000", "4097", "0", "1,,2", "1 2", ""]
)
def test_numbers_of_devices_that_are_none(sizes: str) -> None:
    """Seen: `serve plan` ended with a traceback for `cv = 1e-200`, and took all memory for `--devices 1000000000`."""
    with pytest.raises(FluidTuneError, match="is not a list of whole numbers of 1 to 4096, for example 1,2,4,8,16"):
        device_counts(sizes)
    assert device_counts("4, 4096,008") == [4, 4096, 8]


@pytest.mark.parametrize(("trials", "iterations"), [(0, None), (None, 0), (-1, 5)])
def test_a_plan_of_no_trials_or_iterations(trials: int | None, iterations: int | None) -> None:
    from fluidtune.commands.plan import job_of

    with pytest.raises(FluidTuneError, match="1 or more of each"):
        job_of("profile.json", trials, iterations)


@pytest.mark.parametrize("command", ["start", "status", "stop"])
def test_an_arbiter_that_does_not_answer(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: `arbiter stop` and `arbiter status` ended with a traceback."""
    from ray.exceptions import GetTimeoutError

    def fails(*_: Any, **settings: Any) -> Any:
        raise GetTimeoutError("not ready after 30 s")

    for name in ("find", "start", "status", "stop"):
        monkeypatch.setattr(control, name, fails)
    raised = _invoke(monkeypatch, command)
    assert isinstance(raised, FluidTuneError)
    assert str(raised) == "the arbiter does not answer (GetTimeoutError: not ready after 30 s); try again"
    monkeypatch.setattr(control, "stop", lambda: (_ for _ in ()).throw(ThemisError("1 reservation is left")))
    assert command != "stop" or str(_invoke(monkeypatch, command)) == "1 reservation is left"


@pytest.mark.parametrize("group, command", [("arbiter", "start"), ("arbiter", "status"), ("serve", "status")])
def test_help_and_a_wrong_option_need_no_cluster(group: str, command: str) -> None:
    # Seen: without a Ray cluster, `fluidtune arbiter start --help` said "there is no Ray cluster".
    helped = CliRunner().invoke(cli, [group, command, "--help"])
    assert helped.exit_code == 0 and helped.output.startswith("Usage:")
    wrong = CliRunner().invoke(cli, [group, command, "--address", "10.1.2.3:6379"])
    assert wrong.exit_code == 2 and "No such option" in wrong.output


@pytest.mark.parametrize(
    "options, mentions",
    [
        (["--quota", "a"], "--quota a: expected USER=N"),
        (["--quota", "a=2", "--quota", "b=1.5"], "--quota b=1.5: expected USER=N, with a whole number, or USER=none"),
        (["--reserve", "job=x"], "--reserve job=x: expected JOB=N, with a whole number"),
        (["--weight", "a=-1"], "weight of user 'a'"),
        (["--notice", "700"], "notice_s=700"),
    ],
)
def test_impossible_settings_of_the_arbiter(options: list[str], mentions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "find", lambda: None)
    raised = _invoke(monkeypatch, "start", *options)
    assert isinstance(raised, FluidTuneError) and mentions in str(raised)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Stands in for a running arbiter of GPUs. Returns the settings that it had, the present ones last."""
    import ray

    settings = [Settings(lease_s=20.0, notice_s=5.0)]

    def configure(changes: dict[str, Any]) -> None:
        settings.append(settings[-1].changed(changes))

    actor = SimpleNamespace(configure=SimpleNamespace(remote=configure))
    monkeypatch.setattr(control, "find", lambda: actor)
    monkeypatch.setattr(control, "status", lambda: {"unit": "GPU", "apps": {"job": {"user": "anna"}}})
    monkeypatch.setattr(ray, "get_actor", lambda *args, **options: actor)
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    return settings


def test_settings_of_an_arbiter_that_runs(running: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("--lease 25", "--unit GPU --quota a=4", "--quota b=2 --reserve s=1", "--quota a=none")
    for options in map(str.split, changes):
        assert _invoke(monkeypatch, "start", *options) is None
    assert running[-1] == Settings(lease_s=25.0, notice_s=5.0, quotas={"b": 2}, reserves={"s": 1})
    assert running[-2].quotas == {"a": 4, "b": 2}
    done = CliRunner().invoke(cli, ["arbiter", "start", "--quota", "anna=1", "--weight", "root=2"])
    assert "no job now is of root; users with jobs: anna\n" in done.output


@pytest.mark.parametrize("options, mentions", [(["--unit", "CPU"], "leases GPUs"), (["--lease", "4"], "notice_s=5")])
def test_impossible_settings_of_an_arbiter_that_runs(
    options: list[str], mentions: str, running: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = _invoke(monkeypatch, "start", *options)
    assert isinstance(raised, FluidTuneError) and mentions in str(raised)
    assert len(running) == 1


def test_an_unknown_option_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv); print(__name__); raise SystemExit(3)\n")
    done = fluidtune("run", "--devices", "cpu:1", str(script), "--devices", "x", "-h")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == [str([str(script), "--devices", "x", "-h"]), "__main__"]


def test_a_plan_leaves_out_what_cannot_hold_a_trial(tmp_path: Path) -> None:
    """Seen: `fluidtune plan` ended with "AssertionError: trials never ended" where each trial needs several devices."""
    events = [
        {**event, "share": 2.0} if event["event"] == "trial_added" else event
        for event in random_run(0, devices=2, trials=3, iterations=3)
    ]
    written(tmp_path, events)
    done = fluidtune("plan", ".", "--devices", "1,2,4", cwd=tmp_path)
    assert "left out, as a trial needs more: 1\n" in done.stdout and done.returncode == 0
    refused("plan", ".", "--devices", "1", mentions="needs 2 devices, and --devices is 1; give 2 or more", cwd=tmp_path)


@pytest.mark.parametrize(
    "command, shown, file",
    [
        (["report", "."], "utilisation", "summary.json"),
        (["plan", ".", "--devices", "1,2"], "predicted by the twin", "plan.png"),
    ],
)
def test_figures_are_printed_where_no_file_can_be_written(
    command: list[str], shown: str, file: str, tmp_path: Path
) -> None:
    written(tmp_path, random_run(0, devices=2, trials=3, iterations=3))
    (tmp_path / file).mkdir()  # also root cannot write a file of that name
    done = fluidtune(*command, cwd=tmp_path)
    assert shown in done.stdout and "wrote" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("fluidtune: ")]
    assert done.returncode == 1 and len(lines) == 1 and "Traceback" not in done.stderr
    assert "could be written" in lines[0] and file in lines[0]


def test_whoever_has_read_enough_gets_no_error(tmp_path: Path) -> None:
    """Seen: `fluidtune report RUN_DIR | head -5` said that not all files could be written, and a broken pipe."""
    written(tmp_path, random_run(1, devices=1, trials=3))
    command = f"PYTHONPATH={ROOT} {sys.executable} -m fluidtune report . | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stderr == "" and done.stdout.count("\n") == 1


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
def test_an_example_from_the_command_line(tmp_path: Path) -> None:
    name = "digits_elastic"
    script = ROOT / "examples" / f"{name}.py"
    done = fluidtune(
        "run", "--devices", "cpu:2", str(script), "--samples", "4", "--epochs", "3", "--storage", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "best accuracy 0." in done.stdout and "in starts of trials" in done.stderr
    assert all((tmp_path / name / each).stat().st_size > 100 for each in REPORT_FILES), "drawn when the run ends"
    (log,) = (tmp_path / name).glob("*.jsonl")
    shown = fluidtune("report", str(tmp_path / name))
    assert shown.returncode == 0, shown.stderr
    assert "timeline.png" in shown.stdout
    assert log.stat().st_size > 0

"""Several models in one service, in a real Ray cluster: three on two processes, each of which has room for two."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from ray.tune import Checkpoint

import fluidtune
from benchmarks.common import free_ports
from fluidtune.errors import FluidTuneError
from fluidtune.report import read_events
from fluidtune.serving.running_services import find
from fluidtune.serving.winners import Winner
from tests.conftest import assert_nothing_left
from tests.serve.driving import PATIENCE_S, until
from tests.serving.asking import ask, command

pytestmark = [pytest.mark.ray, pytest.mark.serve, pytest.mark.faults]

ROOT = Path(__file__).parents[2]
#: Seconds of an input, and of the SLO; bytes of a model, and GiB of a device: room for two.
SECONDS, SLO_S = 0.1, 4.0
BYTES, MEMORY = 1e6, 2.5e6 / 2**30
#: Requests/s: the first keeps one and a half devices busy.
MANY, FEW = 15.0, 1.0


def load(directory, config):
    """Answers each input with the model's name, after `SECONDS`. Beside the model may be a file that says how it loads:

    "fails" once, or "hangs", which the process replaces by its id.
    """
    name, how = Path(directory, "name").read_text(), Path(f"{directory}.loads")
    if how.exists():
        if how.read_text() == "hangs":
            how.write_text(str(os.getpid()))
            time.sleep(PATIENCE_S)
        how.unlink()
        raise ValueError("it fails once")

    def answer(values):
        time.sleep(SECONDS * len(values))
        return [f"{name}{value}" for value in values]

    answer.samples = [1, 2]
    return answer


def tables(where, **rates):
    for name in rates:
        (where / name).mkdir(exist_ok=True)
        (where / name / "name").write_text(name)
    common = {"load": load, "slo": SLO_S, "bytes": BYTES}
    return [{"name": name, "checkpoint": str(where / name), "rate": rate, **common} for name, rate in rates.items()]


@pytest.fixture(scope="module")
def cluster(one_ray):
    one_ray.use(num_cpus=2)
    yield
    assert_nothing_left()


@contextlib.contextmanager
def asking(served, **rates):
    """Ask the models at these rates meanwhile. It gives by model the answers, which are all there in the end."""
    ends, answers = threading.Event(), {name: [] for name in rates}
    with ThreadPoolExecutor(200) as pool:

        def asks(name, rate):
            while not ends.wait(1 / rate):
                answers[name].append(pool.submit(ask, served, 7, name))

        for name, rate in rates.items():
            pool.submit(asks, name, rate)
        try:
            yield answers
        finally:
            ends.set()


def held(served):
    return sorted("".join(models) for models in served.status()["placement"]["devices"].values())


def test_three_models_are_placed_on_two_processes_and_placed_anew_and_a_killed_process_loses_nothing(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    models = tables(tmp_path, a=MANY, b=FEW, c=FEW)
    with fluidtune.serve(models=models, memory=MEMORY, devices="cpu:2", max_batch=2, port=free_ports(1)[0]) as served:
        assert (served.trials, held(served)) == (["a", "b", "c"], ["ab", "ac"])
        with asking(served, a=FEW, b=FEW, c=MANY) as answers:
            until(lambda: held(served) == ["ac", "bc"] and served.status()["placement"]["phase"] == "settled")
            assert "requests/s changed" in served.status()["placement"]["why"]
            before = served.status()["device_pids"]
            os.kill(before[0], signal.SIGKILL)
            until(lambda: len(served.status()["device_pids"]) == 3)
            until(lambda: len(served.status()["device_pids"]) == 4)
            until(lambda: served.status()["placement"]["phase"] == "settled")
            assert set(before[1:]) < set(served.status()["device_pids"]) and held(served) == ["ac", "bc"]
        counted = {one["trial"]: sum(one["requests"].values()) for one in served.status()["trials"]}
        assert counted == {name: len(found) for name, found in answers.items()}
        for name, found in answers.items():
            said = [one.result() for one in found]
            assert (200, f"{name}7") in said
            assert all(status == 503 or (status, value) == (200, f"{name}7") for status, value in said)
    events = read_events(tmp_path / "serving" / "fluid_events.jsonl")
    first, *later = [event for event in events if event["event"] == "models_placed"]
    assert first["reason"].startswith("the service starts") and later


def test_three_models_on_a_device_for_two_answer_all_though_a_load_fails_and_one_is_killed(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    models, codes = tables(tmp_path, a=FEW, b=FEW, c=FEW), Counter()
    with fluidtune.serve(models=models, memory=MEMORY, devices="cpu:1", max_batch=2, port=free_ports(1)[0]) as served:

        def answers(name):
            status, said = ask(served, 7, name)
            codes[said["code"] if status == 503 else status] += 1
            return (status, said) == (200, f"{name}7")

        def resting():
            return next(name for name in "abc" if name not in held(served)[0])

        assert urlopen(f"{served.url}v2/models/{resting()}/ready", timeout=PATIENCE_S).status == 200
        for name in "abcabc":  # Each one in turn is that which has just left, or will.
            until(partial(answers, name))
        name = resting()
        loads = tmp_path / f"{name}.loads"
        loads.write_text("fails")
        for other in (name, *"abc", resting()):
            until(partial(answers, other))
        name = resting()
        loads = tmp_path / f"{name}.loads"
        loads.write_text("hangs")
        until(lambda: answers(name) or loads.read_text().isdigit())
        pid = int(loads.read_text())
        loads.unlink()
        os.kill(pid, signal.SIGKILL)
        for other in (name, *"abc"):
            until(partial(answers, other))
        assert codes.keys() <= {200, "loading", "no_model_process"} and codes["loading"]
        counted = served.status()["placement"]["loads"]
    events = read_events(tmp_path / "serving" / "fluid_events.jsonl")
    moved = Counter((one["trial"], one["what"]) for one in events if one["event"] == "model_moved")
    assert counted == {name: moved[name, "loaded"] for name in "abc"} and min(counted.values()) >= 2
    assert sum(count for (_, what), count in moved.items() if what == "failed") == 2


def test_the_commands_and_what_is_asked_of_several_models(cluster, tmp_path):
    """No bytes are given, so they are measured; and no memory, so all models fit on the one device."""
    tables(tmp_path, a=FEW, b=FEW)
    lines = [
        f'[[models]]\nname = "{name}"\ncheckpoint = "{name}"\nrate = 1.0\nslo = {slo}\nload = "{__name__}:load"\n'
        for name, slo in (("a", SLO_S), ("b", 9.0))
    ]
    (tmp_path / "models.toml").write_text("\n".join(lines))
    (port,) = free_ports(1)
    given = ("--models", str(tmp_path / "models.toml"), "--devices", "cpu:1", "--max-batch", "2", "--port", str(port))
    _, said = command("start", *given)
    try:
        served = SimpleNamespace(url=f"http://127.0.0.1:{port}/")
        assert f"models a, b: POST an input to http://127.0.0.1:{port}/MODEL" in said
        status, answer = ask(served, 7)
        assert (status, answer["error"]) == (404, "several models are served; POST /MODEL: a, b")
        assert ask(served, 7, "b") == (200, "b7")
        tensors = {"inputs": [{"name": "input", "shape": [1], "datatype": "INT64", "data": [7]}]}
        assert ask(served, tensors, "v2/models/a/infer")[1]["outputs"][0]["data"] == ["a7"]
        _, said = command("status")
        assert "device 0: a, b" in said and "SLO 4000 ms" in said and "SLO 9000 ms" in said
        other = Winner("x", Checkpoint.from_directory(str(tmp_path / "a")), {}, None)
        with pytest.raises(FluidTuneError, match=r"has several models, and versions .*; start it without --models"):
            find()._told("deploy", other, "run", 1.0)
    finally:
        command("stop")


def test_a_checkpoint_that_has_changed_takes_no_other_model_down_nor_the_front(cluster, tmp_path, monkeypatch):
    """Two devices of two models each. The process of one is killed, and then the front. Seen: both stayed down."""
    monkeypatch.chdir(tmp_path)
    names = "abcd"
    models = tables(tmp_path, **dict.fromkeys(names, FEW))
    with fluidtune.serve(models=models, memory=MEMORY, devices="cpu:2", max_batch=2, port=free_ports(1)[0]) as served:
        started = read_events(tmp_path / "serving" / "fluid_events.jsonl")
        pids = {one["worker"].split("-")[2]: one["pid"] for one in started if one["event"] == "worker_started"}
        (tmp_path / "b" / "more").write_text("x")
        others = [name for name in names if name != "b"]

        def as_it_is_to_be():
            try:
                found = served.status()
            except FluidTuneError:  # The front restarts.
                return False
            placed = found["placement"] or {}
            return found["pid"] not in killed and "b" in placed.get("unavailable", {}) and answered()

        def answered():
            try:
                return all(ask(served, 7, name) == (200, f"{name}7") for name in others)
            except OSError:
                return False

        killed = []
        for pid in (pids["b"], served.status()["pid"]):
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            until(as_it_is_to_be)
            status, answer = ask(served, 7, "b")
            assert (status, answer["code"]) == (503, "no_model_process")
            assert answer["reason"].startswith("model b is not loaded: the files of model b have changed since it was")
            placement = served.status()["placement"]
            assert sorted(one for held in placement["devices"].values() for one in held) == others
            assert "b is not loaded: the files of model b" in placement["why"]
            with pytest.raises(OSError, match="503"):
                urlopen(f"{served.url}v2/models/b/ready", timeout=PATIENCE_S)
    events = read_events(tmp_path / "serving" / "fluid_events.jsonl")
    failed = [event for event in events if event["event"] == "model_moved" and event["what"] == "failed"]
    assert failed and all("files of model b have changed" in event["reason"] for event in failed)

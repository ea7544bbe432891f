"""What cannot work is refused in one line, with the value and the remedy, before a worker is started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import ray
from ray import tune
from ray.tune import TuneConfig
from ray.tune.schedulers import ASHAScheduler

import fluidtune
from fluidtune import FluidExecutor, FluidScheduler, FluidTuneError, driver_lock
from tests.tune.running import fit
from tests.tune.trainables import raising, without_checkpoints


def refused(make: Any, *mentions: str) -> str:
    with pytest.raises(FluidTuneError) as raised:
        make()
    message = str(raised.value)
    assert "\n" not in message
    for text in mentions:
        assert text in message, f"{text!r} is not in {message!r}"
    return message


NO_DEVICES = ("cpu:0", "gpu:0", "tpu", "cpu:", "cpu:-1", "cpu:1.5", "", 2)
NOT_ONE_CORE: tuple[dict[str, Any], ...] = ({}, {"devices": "cpu:2"}, {"devices": "cpu:1", "lanes": "FAIR"})
COUNTS = ("max_packing", "max_workers", "device_memory")
#: Settings that cannot work, and what the message names.
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(({"devices": each}, (f"devices={each!r}", '"cpu:N"')) for each in NO_DEVICES),
    *(({name: each}, (f"{name}={each!r}", "at least 1")) for name in COUNTS for each in (0, -1, 1.5, "2", True)),
    ({"devices": "cpu:2", "max_workers": 3}, ("max_workers=3", "cpu:2", "at most 2")),
    ({"arbiter": "other"}, ("arbiter='other'", "auto")),
    ({"reserve": "no"}, ("reserve='no'", "True or False")),
    ({"reserve": True, "arbiter": "auto"}, ("reserve=True", "arbiter='auto'", "leave one")),
    ({"devices": "cpu:1", "beside": True, "arbiter": "auto"}, ("beside=True", "'auto'", "leave beside")),
    ({"user": "anna"}, ("user='anna'", "arbiter")),
    ({"user": 7, "arbiter": "auto"}, ("user=7", "int", "text")),
    ({"lanes": True}, ("lanes=True", "bool", "text")),
    ({"lanes": 7}, ("lanes=7", "int", "text")),
    ({"lanes": "ROUND-ROBIN"}, ("FIFO, PACK, SRTF, FAIR, HPT",)),
    ({"devices": "emulated:2", "lanes": "FAIR"}, ("no memory to divide",)),
    ({"device_memory": 1 << 30}, ("add lanes",)),
    *((each | {"beside": True}, ("beside=True", 'use devices="cpu:1" without lanes')) for each in NOT_ONE_CORE),
    ({"devices": "emulated:2", "profile": 7}, ("profile=7", "int", "text")),
    ({"devices": "emulated:2", "profile": "/nowhere"}, ("/nowhere", "cannot be read")),
    ({"devices": "cpu:2", "profile": "p.json"}, ("is for emulated devices",)),
    ({"devices": "emulated"}, ("emulated:N",)),
]


@pytest.mark.parametrize(("settings", "mentions"), REFUSED, ids=str)
def test_a_setting_that_cannot_work(settings: dict[str, Any], mentions: tuple[str, ...]) -> None:
    refused(lambda: FluidExecutor(**settings), *mentions)


@pytest.mark.parametrize("executor", ["gpu:4", FluidExecutor, {"devices": "cpu:1"}])
def test_something_else_for_an_executor(executor: Any) -> None:
    """It is refused before Ray is started. Seen: `executor="gpu:4"` started Ray and failed with AttributeError."""
    before = ray.is_initialized()
    refused(lambda: fluidtune.Tuner(without_checkpoints, executor=executor), f"executor={executor!r}", "FluidExecutor(")
    refused(lambda: fluidtune.run(without_checkpoints, executor=executor), "no FluidExecutor", "None")
    refused(lambda: FluidScheduler(ASHAScheduler(), executor), "no FluidExecutor")
    assert ray.is_initialized() == before


@pytest.mark.slow
def test_a_type_checker_finds_a_mistyped_setting(tmp_path: Path) -> None:
    """And the public names are those that it and `dir` know. Seen: `mypy --strict` passed a mistyped parameter."""
    script = tmp_path / "script.py"
    script.write_text("import fluidtune\n\nfluidtune.FluidExecutor(max_worker=1)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(script)]
    environment = {**os.environ, "MYPYPATH": str(Path(fluidtune.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    said = done.stdout
    assert 'Unexpected keyword argument "max_worker"' in said, said
    assert set(fluidtune.__all__) <= set(dir(fluidtune))


@pytest.mark.parametrize(
    ("base", "mentions"),
    [
        (FluidScheduler(ASHAScheduler()), ("wrap it once",)),
        (3, ("base_scheduler=3",)),
        ("hyperbrand", ("'hyperbrand'", "hyperband")),
    ],
    ids=["twice", "number", "unknown"],
)
def test_what_is_no_scheduler(base: Any, mentions: tuple[str, ...]) -> None:
    refused(lambda: FluidScheduler(base), *mentions)


def closing_over_a_lock() -> Any:
    lock = threading.Lock()

    def train(config: dict[str, Any]) -> None:
        with lock:
            tune.report({"score": 1})

    return train


def with_a_global_lock() -> Any:
    # As in a script: its functions belong to __main__ and travel with their globals.
    names: dict[str, Any] = {"lock": threading.Lock(), "__name__": "__main__"}
    exec("def train(config):\n    with lock:\n        pass\n", names)
    return names["train"]


def a_method_with_a_global_lock() -> Any:
    return MethodType(with_a_global_lock(), {})


def a_class_with_a_lock() -> Any:
    return type("train", (tune.Trainable,), {"step": closing_over_a_lock()})


LOCKED = [closing_over_a_lock, with_a_global_lock, a_method_with_a_global_lock, a_class_with_a_lock]


@pytest.mark.parametrize("make", LOCKED)
def test_a_trainable_that_cannot_be_pickled_names_the_culprit(make: Any) -> None:
    train = make()
    named = "_thread.lock" if isinstance(train, type) else "'lock' (lock)"
    refused(lambda: fluidtune.Tuner(train), "trainable train", named, "tune.with_parameters")
    with pytest.raises(TypeError):  # as under stock Ray Tune
        fluidtune.Tuner(train)
    refused(lambda: fluidtune.run(train), "trainable train", named)


@pytest.mark.ray
@pytest.mark.newest
@pytest.mark.usefixtures("ray2")
class TestWhatOnlyTheClusterKnows:
    @pytest.mark.parametrize(
        ("executor", "mentions"),
        [
            (FluidExecutor(devices="gpu:2", reserve=True), ('devices="gpu:2"', "has 0")),
            (FluidExecutor(devices="cpu:64", reserve=True), ('devices="cpu:64"', "has 2", "at most 2")),
            (FluidExecutor(devices="gpu:1"), ("'gpu:1'", "has none, 2 CPUs", "no autoscaler", "leave devices out")),
        ],
        ids=str,
    )
    def test_devices_that_are_not_there(self, executor: FluidExecutor, mentions: list[str], tmp_path: Path) -> None:
        refused(lambda: fit("fluid", without_checkpoints, {"x": 1}, tmp_path, executor=executor), *mentions)
        assert not list(tmp_path.glob("*/*/result.json"))
        refused(lambda: fluidtune.run(without_checkpoints, storage_path=str(tmp_path), executor=executor), *mentions)

    def test_a_restored_run_that_is_refused_once_is_not_begun_anew(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Seen: the run began anew, over its results, as soon as the cluster had the devices."""
        from tests.tune.test_driver_lock import driven  # which imports this module

        run, space = tmp_path / "fluid", {"x": 1, "marker": str(tmp_path / "marker"), "failures": 1}
        again: dict[str, Any] = {"path": str(run), "trainable": raising, "resume_errored": True}
        fit("fluid", raising, space, tmp_path, executor=FluidExecutor(), fails=1)
        before = sorted(path.name for path in run.iterdir() if path.is_dir())
        more = FluidExecutor(devices="cpu:64", reserve=True)
        refused(lambda: fluidtune.Tuner.restore(**again, executor=more).fit(), "at most 2")
        with driven(run) as (pid, _):
            refused(tune.Tuner.restore(**again).fit, f"process {pid} on ")
        assert "waiting up to" not in caplog.text  # Seen: it waited, and went on from the state that it had read before
        (result,) = fluidtune.Tuner.restore(**again, executor=FluidExecutor()).fit()
        assert sorted(path.name for path in run.iterdir() if path.is_dir()) == before and not result.error

    def test_a_restored_run_has_the_devices_that_its_first_trial_asked_for(self, tmp_path: Path) -> None:
        """Tune adds the trial with the latest result first: two cores on devices of 1.5. Seen: that one was refused."""
        sized = tune.with_resources(raising, lambda config: {"cpu": config["x"]})
        space = {"x": tune.grid_search([2, 1.5]), "marker": str(tmp_path / "marker"), "failures": 2}
        fit("fluid", sized, space, tmp_path, executor=FluidExecutor(devices="cpu:2"), fails=2)
        again = fluidtune.Tuner.restore(str(tmp_path / "fluid"), sized, param_space=space, resume_errored=True)
        assert not again.fit().errors

    def test_the_same_from_a_stock_tuner(self, tmp_path: Path) -> None:
        tuner = tune.Tuner(
            without_checkpoints,
            param_space={"x": 1},
            tune_config=TuneConfig(scheduler=FluidScheduler(executor=FluidExecutor(devices="cpu:64", reserve=True))),
            run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
        )
        with pytest.raises(Exception, match=r'devices="cpu:64" asks for 64 CPUs, the Ray cluster has 2') as kept:
            tuner.fit()
        # Seen: a notebook keeps the error, and with it the lock was kept.
        assert kept.value and list(tmp_path.iterdir()) and not list(tmp_path.rglob(driver_lock.FILE))

    def test_more_devices_than_there_are_are_a_limit_and_the_job_says_what_it_has(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        many = FluidExecutor(devices="cpu:64")
        with caplog.at_level("WARNING", logger="fluidtune"):
            fit("fluid", without_checkpoints, {"x": 1}, tmp_path, executor=many)
        assert "may have 64 devices, and the Ray cluster has 2" in caplog.text

"""The options of `fluidtune run` are read without click as click reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from click.testing import CliRunner

import fluidtune.cli
from fluidtune.tune.executor import FluidExecutor
from fluidtune.tune.run_options import OPTIONS, read

#: The words after `run` -> the script with its arguments, and the settings.
READ: dict[str, tuple[list[str], dict[str, object]]] = {
    "s.py": (["s.py"], {}),
    "s.py --devices x -m": (["s.py", "--devices", "x", "-m"], {}),
    "--devices cpu:2 --reserve s.py": (["s.py"], {"devices": "cpu:2", "reserve": True}),
    "--devices=cpu:2 --max-packing=3 s.py": (["s.py"], {"devices": "cpu:2", "max_packing": 3}),
    "--lanes --shared s.py": (["s.py"], {"lanes": "--shared"}),
    "--lanes= s.py": (["s.py"], {"lanes": ""}),
    "--no-fork-server --shared s.py a": (["s.py", "a"], {"fork_server": False, "shared": True}),
    "--no-fork-server --fork-server s.py": (["s.py"], {"fork_server": True}),
    "-m pkg.mod --steer": (["pkg.mod", "--steer"], {"m": True}),
    "-m --steer pkg.mod": (["pkg.mod"], {"m": True, "steer": True}),
    "--device-memory 10 -- -s.py -- x": (["-s.py", "--", "x"], {"device_memory": 10}),
    "- -": (["-", "-"], {}),
}


@pytest.mark.parametrize("words", READ)
def test_what_is_given(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(words.split()) == READ[words]
    by_click: list[Any] = []
    monkeypatch.setattr(fluidtune.cli, "run_script", lambda *given: by_click.extend(given))
    done = CliRunner().invoke(fluidtune.cli.cli, ["run", *words.split()], standalone_mode=False)
    assert done.exception is None
    rest, settings = READ[words]
    assert by_click[0] == rest
    assert {name: value for name, value in by_click[1].items() if value != (name == "fork_server")} == {
        name: value for name, value in settings.items() if value != (name == "fork_server")
    }


@pytest.mark.parametrize(
    "words",
    ["", "--help", "-h s.py", "--devices", "--devices x", "--max-packing two s.py", "--shared=1 s.py", "-x s.py"],
)
def test_what_click_is_to_answer(words: str) -> None:
    assert read(words.split()) is None
    done = CliRunner().invoke(fluidtune.cli.cli, ["run", *words.split()])
    assert done.output.startswith(("Usage:", "Error: Option"))


def test_each_setting_has_an_option() -> None:
    options = {names.partition("/")[0].lstrip("-").replace("-", "_") for names, _, _ in OPTIONS} - {"m"}
    assert {name.replace("arbiter", "shared") for name in vars(FluidExecutor())} == options
    assert {field.name for field in dataclasses.fields(FluidExecutor)} == set(vars(FluidExecutor()))

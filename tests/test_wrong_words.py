"""Whatever words a command gets, it ends with a status and at most one line of error, and never with a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidtune.cli import cli, main
from tests.report.makers import random_run, written

#: Commands that look at no cluster and start nothing, with the words that they need.
COMMANDS = {
    "report": ["run"],
    "top": ["run"],
    "why": ["run", "train_4f2e1_00000"],
    "plan": ["run"],
    "docs": ["start"],
    "serve plan": ["run"],
    "run": ["nowhere.py"],
}
ODD = ("", " ", "-1", "0", "1.5", "1e999", "nan", "\u00b2", "9" * 5000, "x" * 300, "../..", "/proc/self/mem", "\udc80")
WORDS = st.sampled_from([*ODD, "{", "1,,2", "=", "a=b", "a:b", "run", "empty", "\u00e9\n"])


def options_of(name: str) -> list[click.Option]:
    command: click.Command = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return [each for each in command.params if isinstance(each, click.Option) and each.name != "m"]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_status_and_one_line(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "deep" / "place"
    if not place.exists():
        written(place / "run", random_run(1, devices=1, trials=3))
        (place / "empty").touch()
    monkeypatch.chdir(place)
    name = data.draw(st.sampled_from(sorted(COMMANDS)))
    words = [data.draw(st.just(word) | WORDS) for word in COMMANDS[name]]
    given_ = []
    options = st.lists(st.sampled_from(options_of(name)), max_size=3) if options_of(name) else st.just([])
    for option in data.draw(options):
        given_ += [option.opts[0]] if option.is_flag else [option.opts[0], data.draw(WORDS)]
    capsys.readouterr()
    main_of_a_script = patch.dict(sys.modules, {"__main__": ModuleType("__main__")})
    with main_of_a_script, patch.object(sys, "argv", ["fluidtune", *name.split(), *given_, *words]):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code  # type: ignore[assignment]
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith(("fluidtune: ", "Error: "))]
    assert status in (0, 1, 2) and len(lines) == (status != 0), said
    assert "Traceback" not in said.out + said.err

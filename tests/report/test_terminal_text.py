"""Names and errors are shown as they are written: no markup, no formula, no code that moves the cursor, one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from fluidtune.cli import cli
from fluidtune.commands import plan
from fluidtune.profiles import Profile
from fluidtune.report import top
from fluidtune.report.events import EventDict
from fluidtune.report.serving_report import Batch, batches_png
from fluidtune.serving import model_placement
from fluidtune.twin import Forecast, grid
from tests.report.makers import added, begin, ended, ev, over, result, started, text_of, written

#: Markup of rich that nothing has opened, a formula that is none, codes that clear a screen (C0 and C1), a line's end,
#: and half of a character.
NAME = "[/x] $a_$ \x1b[2J \x9b2J \x7f \n \ud83d"
SHOWN = r"[/x] $a_$ \x1b[2J \x9b2J \x7f \n \ud83d"


def run() -> list[EventDict]:
    lost = ev(4, "worker_lost", worker=NAME, device=0, reason=NAME)
    return [
        begin(0, 1, run=NAME, metric=NAME, algorithm=NAME, machine=NAME),
        {**added(1, NAME), "name": NAME},
        {**started(2, NAME, 0), "reason": NAME, "why": NAME},
        result(3, NAME, 1, 1.0, 1.0, 0.5),
        lost,
        {**started(5, NAME, 0), "reason": NAME, "why": NAME},
        result(6, NAME, 2, 1.0, 1.0, 0.5),
    ]


@pytest.mark.parametrize("command", [["report"], ["top"], ["why", NAME], ["why", "nobody"]])
def test_names_of_a_run_are_shown_as_they_are(command: list[str], tmp_path: Path) -> None:
    written(tmp_path, [*run(), ended(7, NAME), over(8, 8.0, 1, {"trial": NAME, "metric": 0.5})])
    done = CliRunner().invoke(cli, [command[0], str(tmp_path), *command[1:]], env={"COLUMNS": "300"})
    said = done.stdout + str(done.exception or "")
    assert done.exit_code == (1 if "nobody" in command else 0), done.exception
    assert SHOWN in said and not set("\x1b\x9b\x7f\ud83d") & set(said)


def test_names_of_a_run_that_goes_on_are_shown_as_they_are(tmp_path: Path) -> None:
    out = io.StringIO()
    top.watch(written(tmp_path, run()), Console(file=out, width=300), now=lambda: 7.0)
    end = SHOWN.rpartition("_")[2]
    (row,) = [line for line in out.getvalue().splitlines() if line.startswith(f"{end} ")]
    assert "running" in row and f" {end} (1)" in out.getvalue() and not set("\x1b\x9b\x7f") & set(out.getvalue())


def test_names_of_models_are_shown_as_they_are(tmp_path: Path) -> None:
    counts = {"requests": {NAME: {"answered": 3}}, "batches": {NAME: {"1": 3}}, "waited": {NAME: 1.0}}
    of_start = ("run", "ray", "fluidtune", "python", "machine", "kind", "slo", "starts", "trials")
    start: dict[str, Any] = dict.fromkeys(of_start, "x")
    served = ev(9, "served", seconds=8.0, busy=1.0, devices=1, **counts)
    events = [ev(0, "serving_started", **start, devices=1), served]
    done = CliRunner().invoke(cli, ["report", str(written(tmp_path, events))], env={"COLUMNS": "300"})
    assert done.exit_code == 0 and SHOWN in done.stdout and (tmp_path / "serving.png").exists()
    batches_png([Batch(0, NAME, 1, 0.0, 1.0)], 1, 2.0, tmp_path / "batches.png")


def test_names_of_models_in_a_plan_are_shown_as_they_are() -> None:
    model = {"name": NAME, "slo": 1.0, "attainment": 1.0, "mean_seconds": 1.0, "groups": [0]}
    group = {"configuration": "1x1", "gpus": [0], "bytes_per_gpu": 1, "models": [NAME]}
    plan = {"attainment": 1.0, "idle_gpus": 0, "ended": True, "advice": "", "gpus": 1}
    placed = model_placement.render({**plan, "groups": [group], "models": [model]}, True)
    assert text_of(placed, width=300).count(SHOWN) == 2


def test_the_name_of_a_profile_is_shown_as_it_is(tmp_path: Path) -> None:
    job = grid(1, 1, Profile(NAME, {"1": 1.0}, {}))
    found = [Forecast(1, 1.0, 1.0, 1.0, 0, 1)]
    assert "[/x] $a_$" in text_of(plan.render_plan(job, found), width=300)
    assert plan.plan_png(job, found, tmp_path / "plan.png").exists()

"""What the manager's table counts, against a count of all its runs. No Ray runs here."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.tune.run_table import RunTable


@pytest.mark.parametrize("seed", range(20))
def test_pending_trials_are_counted_without_looking_at_those_that_wait(seed: int) -> None:
    # docs/bugs.md, 163: Tune asks for the number before each trial that it adds, and before each step
    draw = random.Random(seed)
    table = RunTable()
    runs: list[Any] = []
    for step in range(300):
        what = draw.randrange(5)
        run = draw.choice(runs) if runs else None
        if what < 2 or run is None:
            life = SimpleNamespace(place="queued", seen=SimpleNamespace(delivered=draw.choice([0, 3])))
            run = SimpleNamespace(tracked=object(), id=str(step), life=life)
            runs.append(run)
            table.add_run(run)
        elif what == 2:
            table.begin_run(run)
        elif what == 3 and run in table.begun():
            run.life.place = "queued" if run.life.place == "live" else "live"
            run.life.seen.delivered += draw.randrange(2)
        elif what == 4 and draw.random() < 0.3:
            runs.remove(run)
            for _ in range(draw.randint(1, 2)):  # a trial that failed is also let go of by Tune
                table.drop_run(run)
        assert list(table) == runs
        lives = [run.life for run in runs]
        assert table.count_pending() == sum(not one.seen.delivered and one.place != "live" for one in lives)
    assert len(table.begun()) < len(runs)

"""Which trials are served, by what Ray's last snapshot calls them and by whether the run has ended."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fluidtune.errors import FluidTuneError
from fluidtune.report import EVENT_LOG_NAME
from fluidtune.serving import winners as room
from tests.report.makers import begin, ev

#: Best first: each status is a trial's name.
STATUSES = ("PENDING", "ERROR", "PAUSED", "RUNNING", "TERMINATED")
GOING = STATUSES[:1] + STATUSES[2:]
BEGUN, ENDED = begin(0, 1), ev(1, "run_ended", seconds=1.0, trials=5, best=None)


@pytest.mark.parametrize(
    ("logged", "there", "running", "served"),
    [
        ((), ("PAUSED", "TERMINATED"), False, ("PAUSED", "TERMINATED")),
        ((), STATUSES, False, ("TERMINATED",)),
        ((ENDED,), STATUSES, False, STATUSES),
        ((ENDED, BEGUN), ("PAUSED", "TERMINATED"), False, ("TERMINATED",)),
        ((BEGUN,), STATUSES, True, GOING),
        ((ENDED,), STATUSES, True, GOING),
    ],
    ids=["stock, ended", "stock, goes on", "ended", "restored", "followed", "followed, ended"],
)
def test_which_trials_count(logged, there, running, served, tmp_path, monkeypatch):
    """Seen: the best trial of a HyperBand search was left out, as it was stopped while it was paused."""
    if logged:
        (tmp_path / EVENT_LOG_NAME).write_text("\n".join(map(json.dumps, logged)))
    trials = [
        SimpleNamespace(trial_id=one, status=one, checkpoint=one, config={}, last_result={"score": -n})
        for n, one in enumerate(STATUSES)
        if one in there
    ]
    trials.append(SimpleNamespace(trial_id="none", status="TERMINATED", checkpoint=None, last_result={"score": 9}))
    monkeypatch.setattr(room, "trials_of", lambda *given: trials)
    found = room.winners(tmp_path, 9, "score", "max", running)
    assert tuple(one.name for one in found) == served
    assert all(one.goes_on == (one.name != "TERMINATED") for one in found)
    assert room.winner_named(tmp_path, there[-1], "score").value is not None
    with pytest.raises(FluidTuneError, match=r"no trial 'none' in .* has a checkpoint"):
        room.winner_named(tmp_path, "none")


def test_what_is_no_run_is_refused_as_that(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    for path in (tmp_path, tmp_path / "train.py"):
        with pytest.raises(FluidTuneError, match=f"{path} is no run's directory"):
            room.winners(path)

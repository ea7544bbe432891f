"""What a trial finds in its process of what it asks for."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from fluidtune.cluster.forks.fork_launcher import THREADS
from fluidtune.cluster.hosting import trial_resources
from fluidtune.cluster.hosting.trial_resources import TrialResources


@pytest.mark.parametrize(
    ("at_start", "by_driver", "users"),
    [({}, {}, False), ({THREADS: "4"}, {}, True), ({}, {THREADS: "4"}, False), ({THREADS: "4"}, {THREADS: "2"}, True)],
    ids=["Ray's", "the user's", "the driver's", "both"],
)
def test_the_number_of_threads_is_the_users_if_he_has_set_it(
    at_start: dict[str, str], by_driver: dict[str, str], users: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by reading: a user's number that was that of the device's cores was taken for Ray's.
    seen: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=seen.append))  # type: ignore[arg-type]
    monkeypatch.setattr(trial_resources, "environment_at_start", lambda: at_start)
    monkeypatch.setenv(THREADS, "4")
    resources = TrialResources()
    assert resources.taken_of({"A": "1", **by_driver}) == {"A": "1", **({} if users else by_driver)}
    resources.take({"CPU": 4.0}, None)
    resources.take({"CPU": 8.0}, 4)
    assert os.environ[THREADS] == ("4" if users else "8")
    resources.take({"CPU": 4.0}, None)
    assert os.environ[THREADS] == "4" and seen == ([] if users else [8, 4])

"""The versions of a served model as a pure machine, what is refused, and what of a running search becomes one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest

from fluidtune.serving.following import deploy_better, is_better
from fluidtune.serving.model_versions import (
    Deploy,
    Failed,
    Loaded,
    Measured,
    Promote,
    Restored,
    Rollback,
    State,
    Version,
    Versions,
    handle,
    labels,
)
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError
from tests.drawings import changes_of, tried


def first():
    return Versions(Version(1, "a", "run", state="serving"), service="two digits", user="anna")


def after(*events, versions=None):
    versions = versions or first()
    for event in events:
        versions = handle(versions, event)
    return versions


def events_of(versions):
    newest = max(one.number for one in versions.known)
    yield from (Deploy("b", "run", share=share) for share in (0.1, 1.0))
    yield from (Restored(Version(newest + 1, "b", "run", state=state)) for state in ("canary", "kept"))
    for number in (newest - 1, newest):
        yield from (Loaded(number), Measured(number), Failed(number, "it is slow"))
    yield from (Promote(), Rollback())


def test_the_page_draws_exactly_what_the_machine_does():
    """And whatever happens, one version serves, and two at most are loaded: none that has ended or was refused."""
    changes = set()
    for before, event, versions in tried(first(), events_of, handle, 5):
        was, now = ({one.number: one.state for one in each.known} for each in (before, versions))
        assert all(now[number] == "loading" for number in now.keys() - was.keys())
        assert all(was[number] in ("ended", "refused") for number in was.keys() - now.keys())
        changes |= {(was[one], now[one], event) for one in was.keys() & now.keys() if was[one] != now[one]}
        loaded = [number for number, state in now.items() if state not in ("ended", "refused")]
        assert [one.number for one in versions.loaded] == loaded and len(loaded) <= 2
        assert versions.serving.state == "serving"
    assert changes == changes_of("serving-decisions.md", "### The states of a version")
    assert {state for change in changes for state in change[:2]} == set(get_args(State))


def test_a_deploy_moves_at_once_and_a_rollback_puts_the_old_one_back():
    moved = after(Deploy("b", "run"), Loaded(2), Measured(2))
    assert (moved.phase, moved.serving.key, moved.other.key) == ("moved", "b@2", "a")
    assert list(moved.answering) == ["1", "2"]
    back = handle(moved, Rollback())
    assert (back.phase, back.serving.number, back.last.number) == ("one", 1, 2)
    assert after(Deploy("c", "run"), versions=back).other.number == 3


def test_a_share_of_the_requests_is_drawn_by_their_ids():
    canary = after(Deploy("b", "run", share=0.1), Loaded(2), Measured(2))
    ids = [f"request-{number}" for number in range(10_000)]
    drawn = [canary.drawn(one).number for one in ids]
    assert 0.08 < drawn.count(2) / len(ids) < 0.12
    assert drawn == [canary.drawn(one).number for one in ids]
    assert {canary.drawn(one, able=False).number for one in ids} == {1}
    assert {after(Promote(), versions=canary).drawn(one).number for one in ids} == {2}


@pytest.mark.parametrize("state", ["canary", "kept"])
def test_what_comes_back_after_a_restart_takes_its_place_again(state):
    was = Version(2, "b", "run", state=state, share=0.1)
    back = after(Restored(was))
    assert (back.phase, back.other.state) == ("loading", "loading")
    assert after(Loaded(2), Measured(2), versions=back).other == Version(2, "b", "run", None, state, state, 0.1)


@pytest.mark.parametrize(
    ("before", "event", "said"),
    [
        ([], Rollback(), r"only version 1 \(trial a\) of service 'two digits' is loaded, so there is nothing"),
        ([], Promote(), "there is no canary to promote; fluidtune serve --user anna status --name 'two digits' shows"),
        ([Deploy("b", "run")], Deploy("c", "run"), r"version 2 \(trial b\) is being deployed; wait for it"),
        (
            [Deploy("b", "run", share=0.1), Loaded(2), Measured(2)],
            Deploy("c", "run"),
            r"version 2 \(trial b\) is a canary; fluidtune serve --user anna promote --name 'two digits'",
        ),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(before, event, said):
    with pytest.raises(ServeError, match=said):
        after(*before, event)


def test_a_key_names_the_trial_and_the_version():
    assert [labels(Version(number, "a_1", "run").key) for number in (1, 2)] == [("a_1", "1"), ("a_1", "2")]


@pytest.mark.parametrize(
    ("value", "known", "mode", "better"),
    [
        (0.9, [0.8], "max", True),
        (0.8, [0.8], "max", False),
        (0.1, [0.2, None], "min", True),
        (0.9, [0.8, 0.95], "max", False),
        (0.9, [None], "max", True),
    ],
)
def test_better_is_better_than_each_that_is_known(value, known, mode, better):
    assert is_better(value, known, mode) is better


async def test_what_was_rolled_back_is_deployed_when_it_has_got_better():
    class Rollouts:
        versions = Versions(Version(1, "a", "run", SimpleNamespace(value=0.4), "serving"))

        async def deploy(self, winner, run, share):
            self.versions = handle(self.versions, Deploy(winner.name, run, winner, share))

    rollouts = Rollouts()

    async def phase(value):
        await deploy_better(rollouts, Winner("b", None, {}, value), "run", "max")
        return rollouts.versions.phase

    assert await phase(0.5) == "loading"
    assert await phase(0.6) == "loading" and rollouts.versions.other.what.value == 0.5  # One deploy at a time.
    rollouts.versions = handle(rollouts.versions, Rollback())
    assert await phase(0.5) == "one"
    assert await phase(0.55) == "loading"

"""What an actor hands on to its caller when its process cannot be a fork."""

from __future__ import annotations

import inspect

import pytest

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.serving.model_process import ModelProcess


@NeedsPlainProcess.handed_on_by
class Actor:
    def __init__(self, fails: bool) -> None:
        self.asked = False
        if fails:
            raise NeedsPlainProcess("torch was imported")

    def load(self, what: str, *, twice: bool = False) -> str:
        if what == "torch":
            self._import()
        return what * (1 + twice)

    def _import(self) -> None:
        raise NeedsPlainProcess("torch was imported")


def test_every_call_hands_on_that_a_plain_process_is_needed():
    # Seen: with Ray 2.44 a trial that needs one failed with "the actor died unexpectedly".
    actor = Actor(False)
    assert actor.load("x", twice=True) == "xx"
    for call in (lambda: Actor(True), lambda: actor.load("torch")):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert NeedsPlainProcess.said_by(raised.value) == "torch was imported"
    with pytest.raises(NeedsPlainProcess):
        actor._import()


@pytest.mark.parametrize("actor", [Worker, ModelProcess])
def test_all_calls_of_processes_that_run_what_users_wrote_hand_it_on(actor):
    calls = [method for name, method in vars(actor).items() if inspect.isfunction(method) and name[0] != "_"]
    assert calls and all(hasattr(call, "__wrapped__") for call in [actor.__init__, *calls])

"""Whatever happens in whatever order, a trial's life is consistent, and in the end every trial is over.

The manager, the engine and the trials' lives are real. Tune, the devices and the workers are played (`played`).
"""

from __future__ import annotations

import logging
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.trials.played import FAULTS, Play

SEEDS = st.integers(0, 2**16)


class LifeMachine(RuleBasedStateMachine):
    """One job, in which the rules below happen in any order."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        logging.disable(logging.WARNING)
        self.stack = ExitStack()
        self.stack.callback(logging.disable, logging.NOTSET)
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        # Answers fail as often as in the wildest schedules. Other faults are rules of their own.
        self.play = Play(random.Random(seed), faults=120)
        self.stack.enter_context(self.play.stage(Path(directory)))
        self.play.begin()

    @rule(seed=SEEDS, count=st.integers(1, 12))
    def work(self, seed: int, count: int) -> None:
        """Workers answer, one after the other, and Tune reacts."""
        self.play.rng = random.Random(seed)
        for _ in range(count):
            self.play.now += 0.1
            self.play.step(answers=True)

    @rule(seed=SEEDS, what=st.sampled_from(FAULTS))
    def fault(self, seed: int, what: str) -> None:
        self.play.rng = random.Random(seed)
        self.play.fault(what)

    @rule(seconds=st.sampled_from([0.5, 40.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.play.now += seconds
        self.play.step(answers=False)

    def teardown(self) -> None:
        if hasattr(self, "play"):
            try:
                self.play.finish()
            finally:
                self.stack.close()


LifeMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLife = LifeMachine.TestCase

"""An engine in the surroundings that most tests need."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.engine.reasons import Reason, because
from fluidtune.engine.trial import Trial
from tests.engine.invariants import check_engine


class Bench:
    """An engine that is validated after every batch; ``at`` counts the batches and serves as the time."""

    def __init__(self, devices: int = 0, *, per_node: int = 100, synchronous: bool = True, **settings):
        self.engine = Engine(**settings)
        self.at = 0.0
        gained = [m.DeviceGained(d, f"node{d // per_node}") for d in range(devices)]
        assert self(*gained, m.GroupAnnounced("g", synchronous)) == []

    def __call__(self, *events: m.Event) -> list[m.Instruction]:
        self.at += 1
        out = self.engine.handle(*events, now=self.at)
        check_engine(self.engine)
        return out

    def results(self, trial: str, seconds: float, count: int, width: float = 1) -> list[m.Instruction]:
        out = []
        for _ in range(count):
            out += self(m.Result(trial, seconds, width))
        return out


def book(engine: Engine, trial: str) -> Trial:
    """The engine's own record of a trial."""
    return engine._state.trials[trial]


def all_views(engine: Engine) -> dict[str, tuple]:
    """What is known of every trial ever added, in the order first added."""
    fields = attrgetter("kind", "since", "resizing_to", "share", "iterations", "done")
    return {name: (engine.trial(name), *fields(trial)) for name, trial in engine._state.trials.items()}


def holders(engine: Engine) -> dict[int, tuple[str, ...]]:
    """By device, the trials that hold it, in the order in which they came."""
    return {device: tuple(tenants) for device, tenants in engine._state.devices.tenants.items()}


def elastic(trial: str, iterations: float | None = 100, group: str = "g") -> m.TrialAdded:
    """A trial that commits and can grow."""
    return m.TrialAdded(trial, group, "elastic", iterations, growable=True)


def grows(trial: str) -> tuple[m.Event, m.Event]:
    """The trial turns out to commit, and to be able to grow."""
    return m.KindFound(trial, "elastic"), m.CanGrow(trial)


def plain(trial: str, iterations: float | None = 100, share: float = 1.0, group: str = "g") -> m.TrialAdded:
    return m.TrialAdded(trial, group, "plain", iterations, share)


def alone(
    devices: int = 2, iterations: float | None = 100, models: Sequence[m.ModelFound] = (), **settings: float
) -> Bench:
    """One trial on device 0, just found to be elastic and not measured; the other devices are idle."""
    bench = Bench(devices, **settings)
    assert bench(*models, plain("a", iterations)) == [start("a", (0,), 1.0)]
    assert bench(*grows("a")) == []
    return bench


# Instructions as tests expect them: two are equal whatever their reasons, which tests/engine/test_reasons.py looks at.


def start(trial: str, devices: tuple[int, ...], share: float) -> m.Start:
    return m.Start(trial, devices, share, why=because(Reason.FREE_DEVICE, waiting=1, idle=1))


def resume(trial: str, devices: tuple[int, ...], share: float) -> m.Resume:
    return m.Resume(trial, devices, share, why=because(Reason.FREE_DEVICE, waiting=1, idle=1))


def resize(trial: str, devices: tuple[int, ...]) -> m.Resize:
    return m.Resize(trial, devices, why=because(Reason.GROWTH_ENDED, width=2, to=1))


def suspend(trial: str) -> m.Suspend:
    return m.Suspend(trial, why=because(Reason.LEAVING_DEVICE, width=1, leaving=1))


def release(trial: str, devices: tuple[int, ...]) -> m.Release:
    return m.Release(trial, devices, why=because(Reason.TRIAL_LEFT))

"""The engine: events go in, and instructions come out.

`Engine.handle` takes a batch of events. `event_handlers` changes the books (`State`) one event at a time; then, once
per batch, `placing`, `packing_search` and `resizing` decide. There is no clock, no Ray, no torch and no randomness
here: ``now`` is handed in, and the same events give the same instructions on real devices and in the twin. The engine
decides neither which trials there are, which Tune does, nor how a resize is done, which the shell does.
"""

from __future__ import annotations

from collections.abc import Iterator

from fluidtune.engine.device_demand import DeviceDemand, device_demand
from fluidtune.engine.estimates import base_seconds, current_width, height, iterations_left
from fluidtune.engine.event_handlers import apply_event, known_trial
from fluidtune.engine.messages import Event, Instruction
from fluidtune.engine.packing_search import SEARCH_LIMIT, PackingSearch, judge_attempt, let_trials_join
from fluidtune.engine.placing import devices_wanted, new_waits, start_waiting
from fluidtune.engine.reasons import Why
from fluidtune.engine.resizing import (
    clear_leaving_devices,
    leave_lost_devices,
    rebalance_widths,
    shrink_for_waiting,
    shrink_slower_trials,
    shrink_ungrowable_trials,
)
from fluidtune.engine.sharing import Sharing
from fluidtune.engine.state import State
from fluidtune.engine.trial import EngineError, Trial, TrialView, TrialWork
from fluidtune.engine.width_rules import growth_pays, widest
from salus_share.lanes import Place


class Engine:
    """Divides devices among the trials of one tuning job.

    One thing: the methods are the events, each handed to the module that handles it, and views of the state.

    Args:
        lanes: the policy (`salus_share.policies`) under which trials share a device, whose memory then limits sharing
            as well (`sharing`). None: trials share devices by count.
        max_packing: c, how many trials may share one device. 1: one, unless the script asks for a share below 1. None:
            c is found while trials train (`packing_search`).
        search_limit: the largest c that may be found; read only if ``max_packing`` is None.
        concurrent_packing: how many trials of an asynchronous group may share one device for the sake of its
            concurrency, if that is more than c.
        max_workers: d, the widest that a trial may get. None: all devices.

    Raises:
        EngineError: a setting that cannot work.
        SalusError: ``lanes`` names no policy.
    """

    def __init__(
        self,
        *,
        lanes: str | None = None,
        max_packing: int | None = 1,
        search_limit: int = SEARCH_LIMIT,
        concurrent_packing: int = 1,
        max_workers: int | None = None,
    ) -> None:
        if max_packing is not None and max_packing < 1:
            raise EngineError(f"max_packing is {max_packing!r}, expected >= 1 (1: no packing), or None to find it out")
        if max_workers is not None and max_workers < 1:
            raise EngineError(f"max_workers is {max_workers!r}, expected >= 1, or None for all devices")
        self._state = State(
            c=max_packing or 1,
            search=PackingSearch(search_limit) if max_packing is None else None,
            sharing=None if lanes is None else Sharing(lanes),
            concurrent_packing=concurrent_packing,
            max_workers=max_workers,
        )
        #: Instructions that follow from events taken since the last decision. Empty between two calls unless one
        #: raised.
        self._undelivered: list[Instruction] = []

    def handle(self, *events: Event, now: float) -> list[Instruction]:
        """Takes the events in order, then decides once. ``now``: seconds on whatever clock the shell has.

        Raises EngineError for an event that cannot be true. That event changes nothing. The events before it in the
        batch are taken, and what follows from them is returned by the next call; the events after it are not taken.
        docs/engine.md says what each step is for.
        """
        state = self._state
        for event in events:
            self._undelivered += apply_event(event, state, now)
        out, self._undelivered = self._undelivered, []
        state.drop_stale_claims()
        out += leave_lost_devices(state)
        out += clear_leaving_devices(state, now)
        out += shrink_ungrowable_trials(state)
        out += shrink_slower_trials(state)
        out += judge_attempt(state, now)
        out += start_waiting(state, now)
        if state.waiting:
            out += let_trials_join(state, now)
        wanted = devices_wanted(state) if state.waiting else 0
        if wanted and state.wide:
            out += shrink_for_waiting(state, wanted - len(state.devices.idle))
        state.events_before_look -= len(events)
        if not wanted and state.reconsider and state.events_before_look <= 0:
            out += rebalance_widths(state, now)
        return out

    # Views: which trial holds which device

    def tenants(self, device: int) -> tuple[str, ...]:
        """The trials that hold ``device``, in the order in which they came; none if the device is not there."""
        return tuple(self._state.devices.tenants.get(device, ()))

    def held_devices(self) -> dict[str, tuple[int, ...]]:
        """Devices of every trial that holds some, by trial, in the order in which the trials started.

        A trial holds the devices that it runs on, the first worker's device first, and after them those that it was
        promised: by a `Start` or `Resize` that the shell has not answered yet. A trial that waits, is paused or has
        ended is left out.
        """
        trials = self._state.trials
        return {name: tuple(trials[name].held) for name in self._state.running}

    def is_free(self, device: int) -> bool:
        """Whether ``device`` is there and no trial holds it or was promised it."""
        tenants = self._state.devices.tenants.get(device)
        return tenants is not None and not tenants

    @property
    def held_count(self) -> int:
        """Number of devices that trials hold or were promised."""
        return self._state.devices.held

    @property
    def idle_devices(self) -> tuple[int, ...]:
        """Devices that no trial holds and that do not leave, ascending."""
        return tuple(self._state.devices.idle)

    def has_device(self, device: int) -> bool:
        """Whether the engine knows ``device``."""
        return device in self._state.devices.tenants

    def demand(self, room: int) -> DeviceDemand:
        """The devices that the job could use beyond those that its trials hold; at most ``room`` for growth."""
        return device_demand(self._state, room)

    @property
    def knows_trials(self) -> bool:
        """Whether a trial was ever added."""
        return bool(self._state.trials)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Trials that wait, next first. Sorts all of them; `waiting_count` does not."""
        return tuple(self._state.waiting.in_order())

    @property
    def waiting_count(self) -> int:
        """Number of trials that wait."""
        return len(self._state.waiting)

    def new_waits(self) -> list[tuple[int, list[str], Why]]:
        """What is new of why trials wait since this was asked last, by lines of the queue: see `placing.new_waits`."""
        return new_waits(self._state)

    # Views: what is known

    @property
    def c(self) -> int:
        """The packing limit: given, or as far as it was found."""
        return self._state.c

    def work_done(self) -> float:
        """Seconds of work that all trials ever added have done, as on one worker."""
        state = self._state
        return sum(trial.done * base_seconds(state, trial) for trial in state.trials.values() if trial.done)

    def works_left(self, most: int, later: float = 0.0) -> Iterator[TrialWork]:
        """The work left of every trial that waits or holds devices, in the order first added.

        most: the number of devices that the job may have. later: seconds until further ones would be of use.
        """
        state = self._state
        for trial in state.trials.values():
            if trial.status in ("running", "suspending", "waiting"):
                left, base = iterations_left(trial), base_seconds(state, trial)
                least = max(trial.gang, len(trial.devices))
                ever = max(least, widest(state, trial, most))
                useful = ever if growth_pays(state, trial, most, later) else least
                have = (trial.name, trial.group.name, tuple(trial.devices), useful, ever)
                yield TrialWork(*have, trial.iterations, trial.done, left * base, base)

    def _width(self, trial: Trial) -> float:
        if self._state.sharing is None or not trial.devices:
            return len(trial.devices) * trial.share
        return current_width(self._state, trial)

    def trial(self, name: str) -> TrialView:
        """A copy of what is known of one trial. Raises EngineError if it was never added."""
        state = self._state
        trial = known_trial(state, name)
        return TrialView(
            group=trial.group.name,
            status=trial.status,
            devices=trial.devices,
            width=self._width(trial),
            height=height(state, trial),
            seconds=trial.speed.by_width(),
            rung=trial.rung,
        )

    def place_in_lanes(self, name: str) -> Place | None:
        """The trial's lane on the device that it shares, and the parts of its memory that it is promised.

        The shell tells the trial's process before its next iteration. None: it has its device alone, or several, or
        devices are shared by count. Raises EngineError if the trial was never added.
        """
        state = self._state
        trial = known_trial(state, name)
        if state.sharing is None or len(trial.devices) != 1 or state.is_alone(trial):
            return None
        return state.sharing.place_of(trial, state.tenants_of(trial.devices[0]))

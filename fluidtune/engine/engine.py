"""The engine: takes what happened, says what must be done.

`Engine.handle` takes a batch of events, changes the books (`State`) one event at a time, and then decides
once: `placing` starts what waits, `resizing` changes the widths of what runs. There is no clock, no Ray, no
torch and no randomness here: ``now`` is handed in, and the same events give the same instructions, on real
devices and in the twin. It does not decide which trials there are (Tune does), nor how a resize is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import singledispatchmethod

from fluidtune.engine.messages import (
    BudgetChanged,
    DeviceGained,
    DeviceLeaving,
    DeviceLost,
    Event,
    GroupAnnounced,
    Instruction,
    KindFound,
    NeedFound,
    Release,
    Resized,
    ResizeFailed,
    Result,
    TrialAdded,
    TrialEnded,
    WorkerLost,
)
from fluidtune.engine.packing_search import MOST_PACKED, judge, note, seek
from fluidtune.engine.placing import hungry, place
from fluidtune.engine.resizing import evacuate, rebalance, shrink_for, shrink_slower
from fluidtune.engine.sharing import Sharing
from fluidtune.engine.speed import Pool
from fluidtune.engine.state import State
from fluidtune.engine.trial import EngineError, Group, Trial, TrialView


class Engine:
    """Divides devices among the trials of one tuning job.

    ``max_packing``: c, how many trials may share one device (1: none, unless a script asks for it by a share
    below 1; None: found out while trials train, up to ``most_packed``, see `packing`). ``concurrent_packing``: how many
    trials of an asynchronous group may share one for the sake of its concurrency, if that is more. ``max_workers``: d,
    the widest a trial may get (None: all devices).
    ``resize_seconds``: epsilon until the first resize was measured. ``lanes``: the policy under which trials share
    a device, whose memory then limits packing as well (`sharing`); None: they share it by count.
    """

    def __init__(
        self,
        *,
        lanes: str | None = None,
        max_packing: int | None = 1,
        most_packed: int = MOST_PACKED,
        concurrent_packing: int = 1,
        max_workers: int | None = None,
        resize_seconds: float = 0.2,
    ) -> None:
        if max_packing is not None and max_packing < 1:
            raise EngineError(f"max_packing is {max_packing!r}, expected >= 1 (1: no packing), or None to find it out")
        if max_workers is not None and max_workers < 1:
            raise EngineError(f"max_workers is {max_workers!r}, expected >= 1, or None for all devices")
        if not (math.isfinite(resize_seconds) and resize_seconds >= 0):
            raise EngineError(f"resize_seconds is {resize_seconds!r}, expected seconds >= 0")
        sharing = None if lanes is None else Sharing(lanes)
        self._state = State(max_packing, max_workers, resize_seconds, most_packed, sharing, concurrent_packing)
        #: Instructions of events taken since the last decision; empty between calls unless one raised.
        self._undelivered: list[Instruction] = []

    def handle(self, *events: Event, now: float) -> list[Instruction]:
        """Takes the events in order, then decides once. ``now``: seconds on whatever clock the shell has.

        Raises EngineError for an event that cannot be true. That event changes nothing; those before it in
        the batch are taken, and what they lead to is returned by the next call; those after it are not.
        """
        for event in events:
            self._undelivered += self._take(event, now)
        out, self._undelivered = self._undelivered, []
        state = self._state
        state.forgo()
        out += evacuate(state, now)
        out += shrink_slower(state)
        out += judge(state, now)
        out += place(state, now)
        if state.waiting:
            out += seek(state, now)
        wanted = hungry(state) if state.waiting else 0
        if wanted and state.wide:
            out += shrink_for(state, wanted - len(state.devices.idle))
        if not wanted and state.reconsider:
            out += rebalance(state, now)
        return out

    # Views

    @property
    def devices(self) -> dict[int, tuple[str, ...]]:
        """Trials on every device (running there or promised it), in the order they came."""
        return {device: tuple(tenants) for device, tenants in self._state.devices.tenants.items()}

    def held_devices(self) -> dict[str, tuple[int, ...]]:
        """Devices of every trial that holds some, by trial, in the order in which the trials started.

        A trial holds the devices that it runs on, the first worker's device first, and after them those that it was
        promised: by a `Start` or `Resize` that the shell has not answered yet. A trial that waits, is paused or has
        ended is left out. This is the inverse of `devices`.
        """
        trials = self._state.trials
        return {name: tuple(trials[name].held) for name in self._state.running}

    def tenants(self, device: int) -> tuple[str, ...]:
        """The same of one device; none of one that is not there."""
        return tuple(self._state.devices.tenants.get(device, ()))

    @property
    def idle_devices(self) -> tuple[int, ...]:
        """Devices without a trial, ascending."""
        return tuple(self._state.devices.idle)

    @property
    def trials(self) -> dict[str, TrialView]:
        """Every trial ever added, in the order first added. Copies all of them; `trial` copies one."""
        return {name: self.trial(name) for name in self._state.trials}

    @property
    def running(self) -> tuple[str, ...]:
        """Trials that hold devices, in the order they started."""
        return tuple(self._state.running)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Trials that wait, next first."""
        return tuple(self._state.waiting.in_order())

    @property
    def epsilon(self) -> float:
        """Seconds that a resize costs: the mean of those measured, else ``resize_seconds``."""
        return self._state.epsilon

    @property
    def packing(self) -> int:
        """c: given, or as far as it was found out."""
        return self._state.max_packing

    @property
    def gained(self) -> float:
        """Seconds, summed over trials, that widths above 1 saved so far, less the pauses of resizes."""
        return sum(trial.gained for trial in self._state.trials.values())

    def trial(self, name: str) -> TrialView:
        """One trial. Raises EngineError if it was never added."""
        trial, sharing = self._known(name), self._state.sharing
        need = None if sharing is None else sharing.need(trial)
        least = None if sharing is None else sharing.least.get(name)
        return TrialView(
            trial=name,
            group=trial.group.name,
            kind=trial.kind,
            status=trial.status,
            since=trial.since,
            devices=trial.devices,
            resizing_to=trial.resizing_to,
            share=trial.share,
            width=trial.width if sharing is None or not trial.devices else self._state.width(trial),
            iterations=trial.iterations,
            done=trial.done,
            height=self._state.height(trial),
            base=self._state.base(trial),
            seconds=trial.speed.by_width(),
            gained=trial.gained,
            rung=trial.rung,
            need=None if need is None else (float(need.persistent), float(need.ephemeral)),
            least=None if least is None else (float(least.persistent), float(least.ephemeral)),
        )

    def group_seconds(self, group: str) -> dict[float, float]:
        """Seconds per iteration by width, pooled over the group: median at 1, times the median ratio."""
        return self._group(group).pool.by_width()

    def group_overheads(self, group: str) -> tuple[float, float]:
        """alpha and beta (eq. 3.2) as fitted to what the group's trials measured; 1.0 before that."""
        pool = self._group(group).pool
        return pool.alpha, pool.beta

    # Events

    @singledispatchmethod
    def _take(self, event: Event, now: float) -> Iterable[Instruction]:
        raise EngineError(f"{event!r} is not an event the engine knows; see fluidtune.engine.messages")

    @_take.register
    def _(self, event: DeviceGained, now: float) -> Iterable[Instruction]:
        self._state.devices.add(event.device, event.node)
        self._state.reconsider = True
        return ()

    @_take.register
    def _(self, event: DeviceLeaving, now: float) -> Iterable[Instruction]:
        devices = self._state.devices
        if event.device not in devices.node or event.device in devices.leaving:
            raise EngineError(f"device {event.device} is said to leave but is not there to stay; gain it first, once")
        devices.fade(event.device)
        return ()

    @_take.register
    def _(self, event: DeviceLost, now: float) -> Iterable[Instruction]:
        devices = self._state.devices
        if event.device not in devices.node:
            raise EngineError(f"device {event.device} was lost but is not known; gain it first, lose it once")
        out: list[Instruction] = []
        for name in list(devices.tenants[event.device]):
            out += self._lose(self._state.trials[name], now, gone=event.device)
        devices.remove(event.device)
        return out

    @_take.register
    def _(self, event: GroupAnnounced, now: float) -> Iterable[Instruction]:
        group = self._state.groups.get(event.group)
        if event.concurrency is not None and event.concurrency < 1:
            raise EngineError(f"group {event.group!r}: concurrency {event.concurrency}, expected >= 1 or None")
        if group is None:
            pool = Pool(self._state.pool)
            self._state.groups[event.group] = Group(event.group, event.synchronous, event.concurrency, event.tail, pool)
        elif group.synchronous != event.synchronous:
            raise EngineError(f"group {event.group!r} cannot change synchronous; announce a new group")
        else:
            group.concurrency, group.tail = event.concurrency, event.tail
        return ()

    @_take.register
    def _(self, event: TrialAdded, now: float) -> Iterable[Instruction]:
        state = self._state
        group = self._group(event.group)
        share = event.share
        if not (share > 0 and math.isfinite(share)) or (share > 1 and share != int(share)):
            raise EngineError(f"trial {event.trial!r}: share is {share!r}, expected (0, 1] or a whole number")
        self._check_iterations(event.trial, event.iterations)
        trial = state.trials.get(event.trial)
        number = state.next_number()
        if trial is None:
            trial = Trial(event.trial, group, event.kind, share, event.iterations, number, target=event.iterations)
            trial.traits = event.traits
            state.likeness.add(event.traits)
            state.trials[event.trial] = trial
        elif trial.status in ("paused", "ended"):
            trial.group, trial.asked_share = group, share
            trial.set_budget(event.iterations)
            trial.number = number
            # The shell may add it as plain again; what was found while it ran is known better here.
            trial.kind = event.kind if event.kind != "plain" else trial.kind
        else:
            raise EngineError(f"trial {event.trial!r} was added while it is {trial.status}; end it first")
        trial.planned = None
        state.enqueue(trial, now)
        return ()

    @_take.register
    def _(self, event: KindFound, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        trial.kind = event.kind
        self._state.note_wide(trial)
        self._state.reconsider = True
        return ()

    @_take.register
    def _(self, event: BudgetChanged, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        self._check_iterations(event.trial, event.iterations)
        trial.set_budget(event.iterations)
        if trial.status == "waiting":
            self._state.waiting.remove(trial.name)
            self._state.waiting.put(trial, self._state.path(trial))
        self._state.reconsider = True
        return ()

    @_take.register
    def _(self, event: Result, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        if not (math.isfinite(event.seconds) and event.seconds > 0 and event.width > 0):
            raise EngineError(f"{event!r}: expected finite seconds > 0 and a width > 0")
        if self._not_running(trial, event):
            return ()
        state = self._state
        if event.memory is not None:
            self._check_memory(event)
            state.memory = max(state.memory or 0.0, event.memory)
            if state.sharing is not None:
                compute = event.compute if state.is_alone(trial) else None
                state.sharing.found(trial, event.memory, event.ephemeral, compute)
        # Who shares the device is known best here: alone on a packed device means width 1.
        packed = event.width <= 1 and len(trial.devices) == 1
        width = state.width(trial) if packed else event.width
        note(state, trial, event.seconds, now)
        trial.settled = True
        news = False
        # Under a policy that lets others go first there is no telling at which width it ran.
        settled = all(state.trials[name].settled for name in state.devices.tenants[trial.devices[0]])
        if not packed or (settled and width > 0):
            news = trial.speed.record(width, event.seconds)
            trial.group.pool.record(trial.name, trial.speed, width)
            seconds = trial.speed.seconds(1) if width == 1 and trial.speed.count(1) else None
            if seconds is not None and state.likeness.record(trial.name, trial.traits, seconds):
                state.added = None  # who goes first is another matter now
        trial.done += 1
        trial.homes = ()
        if trial.iterations is not None:
            trial.iterations = max(0.0, trial.iterations - 1)
        if trial.name in state.wide:
            trial.gained += state.base(trial) - event.seconds
            state.check_back[trial.name] = None
        if trial.iterations is None and trial.done & (trial.done - 1) == 0:
            news = True  # it is taken to go on for twice as long as it was when that was asked last
        if trial.cooldown:
            trial.cooldown -= 1
            news = news or not trial.cooldown
        if news and trial.kind != "plain" and state.is_worth_growing(trial):
            state.reconsider = True
        return ()

    @_take.register
    def _(self, event: NeedFound, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        self._check_memory(event)
        if self._state.sharing is not None:
            self._state.sharing.lacked(trial, event.memory, event.ephemeral)
        return ()

    @_take.register
    def _(self, event: Resized, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            raise EngineError(f"{event!r}: expected finite seconds >= 0")
        if self._late_answer(trial, event):
            return ()
        trial.gained -= event.seconds
        self._state.note_resize(event.seconds)
        return self._state.settle(trial, event.devices)

    @_take.register
    def _(self, event: ResizeFailed, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        return () if self._late_answer(trial, event) else self._state.settle(trial, event.devices)

    @_take.register
    def _(self, event: WorkerLost, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        if self._not_running(trial, event):
            return ()
        devices = self._state.devices
        if event.left and (not set(event.left) < set(trial.held) or event.left[0] != trial.devices[0]):
            raise EngineError(f"{event!r}: the trial holds {trial.held}; expected some of those, its first one first")
        if event.device in devices.node:
            devices.cold.add(event.device)
        if not event.left:
            return self._lose(trial, now, alive=event.alive)
        trial.has_lost = True
        return self._state.settle(trial, event.left)

    @_take.register
    def _(self, event: TrialEnded, now: float) -> Iterable[Instruction]:
        trial = self._known(event.trial)
        out: list[Instruction] = []
        if trial.status in ("running", "suspending"):
            out.append(Release(trial.name, tuple(self._state.vacate(trial, now))))
        if event.ending == "stopped" and trial.done:
            trial.group.pool.finished(trial.name, trial.done)
        self._state.retire(trial, now, paused=event.ending == "paused")
        return out

    # Parts of events

    def _known(self, name: str) -> Trial:
        trial = self._state.trials.get(name)
        if trial is None:
            raise EngineError(f"trial {name!r} is not known; add it first")
        return trial

    def _group(self, name: str) -> Group:
        group = self._state.groups.get(name)
        if group is None:
            raise EngineError(f"group {name!r} is not known; announce it first")
        return group

    @staticmethod
    def _check_iterations(name: str, iterations: float | None) -> None:
        if iterations is not None and not (math.isfinite(iterations) and iterations >= 0):
            raise EngineError(f"trial {name!r}: iterations is {iterations!r}, expected >= 0 or None")

    @staticmethod
    def _check_memory(event: Result | NeedFound) -> None:
        memory, ephemeral = event.memory, event.ephemeral
        assert memory is not None
        if not (math.isfinite(memory) and memory >= 0 and 0 <= ephemeral <= memory):
            raise EngineError(
                f"{event!r}: expected memory as a part of a device's, finite and >= 0, and ephemeral as a part of it"
            )

    @staticmethod
    def _not_running(trial: Trial, event: Event) -> bool:
        """True if the event comes late: the trial has run but does not now. Raises if it never ran."""
        if trial.status in ("running", "suspending"):
            return False
        if not trial.has_run:
            raise EngineError(f"{event!r}: the trial was never started")
        return True

    def _late_answer(self, trial: Trial, event: Resized | ResizeFailed) -> bool:
        """True if the answer is about a resize that is no more. Raises if there never was such a resize."""
        if self._not_running(trial, event):
            return True
        fits = trial.resizing_to is not None and event.devices and set(event.devices) <= set(trial.held)
        if not fits and not trial.has_lost:
            raise EngineError(
                f"{event!r}: the trial was told to change to {trial.resizing_to} and holds {trial.held}; "
                "expected devices out of those, and one answer to each resize"
            )
        return not fits

    def _lose(
        self, trial: Trial, now: float, *, gone: int | None = None, alive: int | None = None
    ) -> list[Instruction]:
        """The trial gives up its devices and waits at the front.

        ``gone``: a device there is no more. ``alive``: one on which it has a living worker for sure.
        """
        cold = self._state.devices.cold
        homes = dict.fromkeys((alive, *trial.devices, *trial.homes))
        trial.homes = tuple(device for device in homes if device is not None and device not in cold)
        devices = tuple(device for device in self._state.vacate(trial, now) if device != gone)
        trial.first = trial.has_lost = True
        trial.number = self._state.next_number()
        self._state.enqueue(trial, now)
        return [Release(trial.name, devices)] if devices else []

    def validate_state(self) -> None:
        """Asserts every invariant; for tests, after any event."""
        self._state.validate()

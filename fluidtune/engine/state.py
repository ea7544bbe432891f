"""The books of one engine: devices, trials, settings and measurements, and the changes that keep them consistent.

Nothing is decided or estimated here. `event_handlers` turns events into changes, `placing`, `resizing` and
`packing_search` decide further ones, `estimates` and `width_rules` answer questions about the books.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fluidtune.engine.device_table import DeviceTable
from fluidtune.engine.messages import Release
from fluidtune.engine.reasons import Reason, because
from fluidtune.engine.runtime_prediction import RuntimePredictor
from fluidtune.engine.sharing import Sharing
from fluidtune.engine.speed import GroupSpeed
from fluidtune.engine.trial import TRANSITIONS, Group, Status, Trial
from fluidtune.engine.wait_queue import WaitQueue

if TYPE_CHECKING:
    from fluidtune.engine.packing_search import PackingSearch

#: Results that must come in before a resize is tried again that did not do what was asked.
COOLDOWN = 3


@dataclass(eq=False, repr=False)
class State:
    """The books of one engine.

    One thing: the parts of the engine share these books, and each view of them is read by several.
    """

    #: The packing limit by speed: how many trials may share a device. Given, or as far as ``search`` has found it.
    c: int
    #: The search for c; None if c was given.
    search: PackingSearch | None
    #: What trials need of a device's memory, and the lane policy; None: devices are shared by count alone.
    sharing: Sharing | None
    #: How many trials of an asynchronous group may share a device for the sake of its concurrency, if above c.
    concurrent_packing: int
    #: The widest that a trial may get; None: all devices.
    max_workers: int | None
    devices: DeviceTable = field(default_factory=DeviceTable)
    groups: dict[str, Group] = field(default_factory=dict)
    #: Every trial ever added.
    trials: dict[str, Trial] = field(default_factory=dict)
    #: Exactly the trials with status waiting.
    waiting: WaitQueue = field(default_factory=WaitQueue)
    #: Exactly the trials of synchronous groups that wait, run or are suspending (values are unused).
    batch: dict[str, None] = field(default_factory=dict)
    #: Trials that came into ``batch`` since StaticFluid was computed; None: compute it again.
    new_in_batch: int | None = None
    #: Seconds: the sum of the heights of ``batch`` when StaticFluid was computed.
    batch_height: float = 0.0
    #: Exactly the trials with status running or suspending, in the order they started (values are unused).
    running: dict[str, None] = field(default_factory=dict)
    #: Exactly the trials that run on several devices and are no gangs (values are unused).
    wide: dict[str, None] = field(default_factory=dict)
    #: Trials that have just lost a device that was not their first one, and have not been told (values are unused).
    narrowed: dict[str, None] = field(default_factory=dict)
    #: Trials that were told to suspend and do not wait again yet. Growing leaves an idle device for each of them.
    claims: dict[str, None] = field(default_factory=dict)
    #: The node that is being emptied for the next trial that needs several devices of one node; None if none is.
    held_node: str | None = None
    #: Something changed that may make another width pay. While it is False, looking again is useless.
    reconsider: bool = False
    #: Events that must come before it is looked again, although something changed; see `resizing.LOOK_AGAIN`.
    events_before_look: int = 0
    #: Trials that just reported a result at a width above 1 and may turn out slower there (values are unused).
    check_back: dict[str, None] = field(default_factory=dict)
    #: Speeds over all groups.
    job_speed: GroupSpeed = field(default_factory=GroupSpeed)
    #: What hyperparameters say about speeds.
    predictor: RuntimePredictor = field(default_factory=RuntimePredictor)
    #: The number that was given last; see `Trial.number`.
    last_number: int = 0

    def is_alone(self, trial: Trial) -> bool:
        """Whether it has one device and no other trial is there."""
        return len(trial.devices) == 1 and len(self.devices.tenants[trial.devices[0]]) == 1

    def next_number(self) -> int:
        """A number above all that were given before."""
        self.last_number += 1
        return self.last_number

    def tenants_of(self, device: int) -> list[Trial]:
        """The trials that hold the device, in the order in which they came."""
        return [self.trials[name] for name in self.devices.tenants[device]]

    # Changes

    def enqueue(self, trial: Trial, path: float, now: float) -> None:
        """``trial``, which holds nothing, waits from now on. ``path``, seconds: see `WaitQueue.put`."""
        self.claims.pop(trial.name, None)
        self._set_status(trial, "waiting", now)
        self.waiting.put(trial, path)
        trial.group.live[trial.name] = None
        if trial.group.synchronous and trial.name not in self.batch:
            self.batch[trial.name] = None
            self.new_in_batch = None if self.new_in_batch is None else self.new_in_batch + 1

    def requeue(self, trial: Trial, path: float) -> None:
        """``trial``, which waits, gets another place in the queue."""
        self.waiting.remove(trial)
        self.waiting.put(trial, path)

    def occupy_devices(self, trial: Trial, devices: tuple[int, ...], slots: int, now: float) -> None:
        """A waiting trial starts: a gang on ``devices``, any other on ``devices[0]``, and it is promised the rest.

        An idle device is divided into ``slots``.
        """
        self.waiting.remove(trial)
        first = devices[0]
        gang = trial.gang > 1
        for device in devices:
            self.devices.add_tenant(device, trial.name, slots)
        if self.sharing is not None:
            self.sharing.lanes_of(first, self.tenants_of(first))
        trial.devices = devices if gang else (first,)
        trial.resizing_to = None if gang or len(devices) == 1 else devices
        trial.share = 1 / self.devices.slots[first]
        trial.first, trial.settled, trial.cooldown = False, False, 0
        trial.past = "started" if trial.past == "new" else trial.past
        trial.speed.restart()
        trial.group.running += 1
        self.running[trial.name] = None
        self._set_status(trial, "running", now)

    def vacate_devices(self, trial: Trial) -> list[int]:
        """Takes all devices from a trial that holds some, and returns them. `enqueue` or `retire` must follow."""
        held = trial.held
        for device in held:
            self.devices.remove_tenant(device, trial.name)
        trial.devices, trial.resizing_to, trial.share = (), None, 0.0
        trial.group.running -= 1
        del self.running[trial.name]
        self.wide.pop(trial.name, None)
        self.check_back.pop(trial.name, None)
        self.reconsider = True
        return held

    def retire(self, trial: Trial, now: float, status: Status) -> None:
        """A trial that holds nothing leaves its group and is ``paused`` or ``ended``."""
        if trial.name in self.waiting:
            self.waiting.remove(trial)
        trial.group.live.pop(trial.name, None)
        self.batch.pop(trial.name, None)
        if status == "ended":
            self.claims.pop(trial.name, None)
        self._set_status(trial, status, now)
        self.reconsider = True

    def drop_stale_claims(self) -> None:
        """Forgets the claims of trials that were told to suspend and are paused.

        A trial that the shell moves waits again in the same batch of events. One that is paused after the batch was
        paused by Tune itself and does not come back soon.
        """
        for name in [name for name in self.claims if self.trials[name].status == "paused"]:
            del self.claims[name]
            self.trials[name].first = False

    def promise_devices(self, trial: Trial, devices: tuple[int, ...]) -> None:
        """A trial is to change to ``devices``. It holds the old and the new ones until it answers."""
        if len(devices) > 1:
            self.divide_device(trial.devices[0], 1)
        for device in devices:
            if device not in trial.devices:
                self.devices.add_tenant(device, trial.name)
        trial.resizing_to = devices

    def divide_device(self, device: int, slots: int) -> None:
        """Divides a device that has tenants into ``slots``; each tenant keeps one. With 1 no other trial can join."""
        self.devices.divide_device(device, slots)
        for name in self.devices.tenants[device]:
            self.trials[name].share = 1 / slots

    def end_resize(self, trial: Trial, devices: tuple[int, ...], reason: Reason) -> list[Release]:
        """The resize is over for this ``reason``: the trial has ``devices`` and gives back what else it held."""
        asked, before = trial.resizing_to, trial.devices
        rest = tuple(device for device in trial.held if device not in devices)
        for device in rest:
            self.devices.remove_tenant(device, trial.name)
        trial.devices, trial.resizing_to = devices, None
        if asked is not None and set(asked) != set(devices):
            trial.cooldown = COOLDOWN
        if len(devices) != len(before):
            trial.speed.restart()
        self.update_wide(trial)
        if not rest:
            return []  # nothing was freed, and the trial's own next step waits for its first result
        self.reconsider = True
        return [Release(trial.name, rest, why=because(reason, to=len(devices)))]

    def update_wide(self, trial: Trial) -> None:
        """Keeps ``wide`` right after a change of the trial's devices."""
        if trial.gang == 1 and len(trial.devices) > 1:
            self.wide[trial.name] = None
        else:
            self.wide.pop(trial.name, None)

    def suspend(self, trial: Trial, now: float) -> None:
        """The trial is to leave its device. It stays until the shell has taken it off, and then waits first."""
        trial.first = True
        self.claims[trial.name] = None
        self._set_status(trial, "suspending", now)

    @staticmethod
    def _set_status(trial: Trial, status: Status, now: float) -> None:
        assert status == trial.status or (trial.status, status) in TRANSITIONS, (trial, status)
        trial.status = status
        trial.since = now

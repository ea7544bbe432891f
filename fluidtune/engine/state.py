"""Everything the engine knows, the changes that keep it consistent, and the estimates that decisions need.

Decides nothing: `engine` turns events into calls of this module, `placing` and `resizing` decide.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from fluidtune.engine.device_table import Devices
from fluidtune.engine.messages import Release
from fluidtune.engine.runtime_prediction import Likeness
from fluidtune.engine.sharing import Sharing
from fluidtune.engine.speed import TRUSTED, Pool, scaled, widest_paying
from fluidtune.engine.trial import Group, Status, Trial
from fluidtune.engine.wait_queue import Waiting
from fluidtune.planning import TrialLoad

#: Results that must come in before a resize is tried again that did not do what was asked.
COOLDOWN = 3
#: An iteration of what follows a group counts so much of one before: each rung waits for its last trial.
TAIL = 1.1
#: The part of a device's memory that may be given out.
MEMORY = 0.95


@dataclass
class Stay:
    """A trial's time on the device of a try; None: not yet. ``before``: it was there, and its iteration is mixed."""

    began: float | None = None
    left: float | None = None
    before: bool = False


@dataclass
class Search:
    """A search for c under way; see `packing`."""

    #: How many trials on a device are tried at the moment, 0 when none; on which, and who came last.
    count: int = 0
    device: int = -1
    newcomer: str = ""
    #: Everyone who was on the device during the try.
    stays: dict[str, Stay] = field(default_factory=dict)
    #: Iterations there that are not judged yet: trial, end, seconds, seconds that it would take alone, own figure.
    pending: list[tuple[str, float, float, float, bool]] = field(default_factory=list)
    #: By number of trials, what iterations took against alone; of trials that were alone before, and of others.
    ratios: dict[int, list[float]] = field(default_factory=dict)
    strangers: dict[int, list[float]] = field(default_factory=dict)
    #: Seconds of trials' first iterations, alone on a device.
    firsts: deque[float] = field(default_factory=lambda: deque(maxlen=101))
    #: Nothing more is tried.
    over: bool = False
    #: Tries that ended before anything was measured, and those that ended at a hopeless iteration.
    spoilt: int = 0
    hopeless: int = 0


class State:
    """The books of one engine."""

    def __init__(
        self,
        max_packing: int | None,
        max_workers: int | None,
        resize_seconds: float,
        most_packed: int = 4,
        sharing: Sharing | None = None,
        concurrent_packing: int = 1,
    ) -> None:
        #: c: how many trials may share a device, if nobody asked for more; as far as is known if it is searched for.
        self.max_packing = max_packing or 1
        #: The most that a search for c may come to.
        self.most_packed = most_packed
        #: How many a device may hold for the sake of a group's concurrency, if that is more.
        self.concurrent_packing = concurrent_packing
        #: None when c was given.
        self.search = Search() if max_packing is None else None
        #: The largest part of a device's memory that a trial was seen to need, None while none was.
        self.memory: float | None = None
        #: What trials need and who shares with whom; None: a device is shared by count alone.
        self.sharing = sharing
        #: d: the widest a trial may get; None: all devices.
        self.max_workers = max_workers
        #: epsilon while no resize was measured.
        self._resize_prior = resize_seconds
        #: Seconds of all resizes that happened, and their number.
        self._resize_total, self._resizes = 0.0, 0
        self.devices = Devices()
        self.groups: dict[str, Group] = {}
        #: Every trial ever added.
        self.trials: dict[str, Trial] = {}
        #: Exactly those with status waiting.
        self.waiting = Waiting()
        #: Exactly those of synchronous groups that wait, run or are suspending (values are unused).
        self.batch: dict[str, None] = {}
        #: How many came into ``batch`` since StaticFluid was computed (None: never), and the sum of heights then.
        self.added: int | None = None
        self.planned_height = 0.0
        #: Exactly those with status running or suspending (values are unused).
        self.running: dict[str, None] = {}
        #: Exactly those elastic ones, gangs not among them, that run on several devices (values are unused).
        self.wide: dict[str, None] = {}
        #: Trials told to suspend that are not back yet; growing leaves each of them one idle device.
        self.claims: dict[str, None] = {}
        #: Node that is being emptied for the next trial that needs several devices of one; None if none is.
        self.hold: str | None = None
        #: Something changed that may make another width pay; False means that looking again is useless.
        self.reconsider = False
        #: Trials that just reported at a width above 1 and may turn out slower there.
        self.check_back: dict[str, None] = {}
        #: Speeds over all groups.
        self.pool = Pool()
        #: What hyperparameters say about speeds.
        self.likeness = Likeness()
        #: Number for the next trial added or sent to the front.
        self._next_number = 0

    # What is known and estimated

    @property
    def epsilon(self) -> float:
        """Seconds that one resize costs: the mean of those measured, else the prior."""
        return self._resize_total / self._resizes if self._resizes else self._resize_prior

    def next_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def iterations_left(self, trial: Trial) -> float:
        """Iterations to come. Where nobody knows: up to what finished trials of its group did, else as many
        again as it has done.
        """
        if trial.iterations is not None:
            return trial.iterations
        total = trial.group.pool.total()
        if total is not None and total > trial.done:
            return total - trial.done
        return max(trial.done, 1)

    def base(self, trial: Trial) -> float:
        """Seconds per iteration on one worker: measured, else from another width, else others', else 1 s."""
        own = trial.speed.base()
        if own is not None:
            return own
        pool = trial.group.pool
        widths = trial.speed.widths()
        if widths:
            nearest = min(widths, key=lambda width: abs(width - 1))
            return (trial.speed.seconds(nearest) or 0.0) / pool.ratio(nearest)
        alike = self.likeness.estimate(trial.traits)
        others = pool.base() if alike is None else alike
        return 1.0 if others is None else others

    def height(self, trial: Trial) -> float:
        """Seconds left on one worker."""
        return self.iterations_left(trial) * self.base(trial)

    def path(self, trial: Trial) -> float:
        """The same until the end of what follows its group, should it be among the best."""
        return (self.iterations_left(trial) + TAIL * trial.group.tail) * self.base(trial)

    def seconds_left(self, trial: Trial, width: float) -> float:
        """Seconds left at ``width``: measured there, else by its own beta, else by its group's ratio; 0: for ever."""
        if width <= 0:
            return math.inf
        seconds = trial.speed.seconds(width)
        if seconds is None or (width != self.width(trial) and trial.speed.count(width) < TRUSTED):
            beta = trial.speed.beta()
            own = beta is not None and width > 1
            ratio = scaled(beta, width) if beta is not None and own else trial.group.pool.ratio(width)
            seconds = self.base(trial) * ratio
        return self.iterations_left(trial) * seconds

    def width(self, trial: Trial) -> float:
        """Width it really runs at: alone on a packed device it has all of it, else its share under the policy.

        0 where the policy lets others go first.
        """
        if len(trial.devices) != 1:
            return len(trial.devices)
        tenants = self.devices.tenants[trial.devices[0]]
        if self.sharing is None or len(tenants) == 1:
            return 1 / len(tenants)
        return self.sharing.width(trial, [(self.trials[name], self.height(self.trials[name])) for name in tenants])

    def is_alone(self, trial: Trial) -> bool:
        """It has one device, and nobody else is there."""
        return len(trial.devices) == 1 and len(self.devices.tenants[trial.devices[0]]) == 1

    def load(self, trial: Trial) -> TrialLoad:
        """The trial as planning wants it."""
        pool = trial.group.pool
        return TrialLoad(trial.name, self.height(trial), pool.alpha, self.beta(trial))

    def beta(self, trial: Trial) -> float:
        """Scaling overhead: the trial's own if it was measured, else its group's."""
        own = trial.speed.beta()
        return own if own is not None else trial.group.pool.beta

    @staticmethod
    def is_worth_growing(trial: Trial) -> bool:
        """At least two iterations are left, as far as is known."""
        return trial.iterations is None or trial.iterations >= 2

    def widest(self, trial: Trial) -> int:
        """d for this trial: what is allowed, there and, by what its group measured, pays."""
        if trial.kind != "elastic" or trial.gang > 1:
            return 1
        return int(min(self.allowed_width(), widest_paying(self.beta(trial))))

    def change_pays(self, trial: Trial, width: int, other: int) -> bool:
        """Is it done sooner at another width? DynamicFluid's rule for scaling up, with measured times."""
        return self.seconds_left(trial, other) + self.epsilon < self.seconds_left(trial, width)

    def shrink_pays(self, trial: Trial, width: int, narrower: int) -> bool:
        """DynamicFluid's rule for scaling down, likewise.

        Growing on idle devices costs nothing, so that an unmeasured beta is taken to be 1 there. Here others
        want the devices: it is taken to be the largest that the model allows, 1 + 1/d.
        """
        before, after = self.seconds_left(trial, width), self.seconds_left(trial, narrower)
        if not self.knows_scaling(trial):
            beta = 1 + 1 / self.allowed_width()
            after = before * scaled(beta, narrower) / scaled(beta, width)
        return narrower * (after + self.epsilon) < width * before

    def knows_scaling(self, trial: Trial) -> bool:
        """Was its beta measured, by itself or by others of its group?"""
        return trial.speed.beta() is not None or trial.group.pool.knows_scaling()

    def allowed_width(self) -> int:
        """d, what was measured left aside."""
        return max(1, min(len(self.devices), self.max_workers or len(self.devices)))

    def packing_limit(self, trial: Trial) -> int:
        """How many may share a device with this trial at most, itself included.

        An asynchronous group without a concurrency runs one trial per share, as stock Tune does, however
        many could be packed, unless packing was found to pay: then its trials come out sooner.
        """
        if trial.gang > 1:
            return 1
        asked = self.asked_packing(trial)
        unpacked = not trial.group.synchronous and trial.group.concurrency is None and self.search is None
        return asked if unpacked else max(self.max_packing if self.sharing else self.fitting_packing, asked)

    @property
    def fitting_packing(self) -> int:
        """c: the smaller of that by speed (given, or found out) and that by memory, as far as it is known."""
        if self.sharing is not None:
            return min(self.max_packing, self.sharing.limit())
        return self.max_packing if self.search is None else min(self.max_packing, self.fits)

    @property
    def fits(self) -> int:
        """How many trials a device may hold, by the largest that was seen; 1 while its memory is not known."""
        if self.memory is None:
            return 1
        return max(1, min(self.most_packed, int(MEMORY / self.memory + 1e-9))) if self.memory else self.most_packed

    def pick_share(self, trial: Trial, forbid: str | None) -> int | None:
        """A packed device with a free share for ``trial``, None if there is none."""
        limit = self.packing_limit(trial)
        if self.sharing is None:
            return next(self.devices.open_shares(limit, forbid), None)
        there = {
            device: [self.trials[name] for name in self.devices.tenants[device]]
            for device in self.devices.open_shares(limit, forbid)
        }
        return self.sharing.choose(trial, there)

    def asked_packing(self, trial: Trial) -> int:
        """How many per device the script itself asked for, by its share or its concurrency."""
        asked = int(1 / trial.asked_share + 1e-9) if trial.asked_share < 1 else 1
        group = trial.group
        if not group.synchronous and group.concurrency and self.devices:
            spread = -(-group.concurrency // len(self.devices))
            asked = max(asked, min(spread, max(self.max_packing, self.concurrent_packing)))
        return max(1, asked)

    def may_start(self, group: Group) -> int:
        """How many more of ``group`` may run at once, if there are devices."""
        if group.synchronous or group.concurrency is None:
            return len(group.live)
        return group.concurrency - group.running

    def node_to_hold(self, gang: int) -> str | None:
        """The node to empty for ``gang`` devices: that which is being emptied already, if it has as many."""
        if self.hold is not None and self.devices.size.get(self.hold, 0) >= gang:
            return self.hold
        return self.devices.node_to_hold(gang)

    # Changes

    def enqueue(self, trial: Trial, now: float) -> None:
        """``trial``, which holds nothing, waits from now on."""
        self.claims.pop(trial.name, None)
        self._set_status(trial, "waiting", now)
        self.waiting.put(trial, self.path(trial))
        trial.group.live[trial.name] = None
        if trial.group.synchronous and trial.name not in self.batch:
            self.batch[trial.name] = None
            self.added = None if self.added is None else self.added + 1

    def occupy(self, trial: Trial, devices: tuple[int, ...], packing: int, now: float) -> None:
        """A waiting trial starts on ``devices[0]``, the rest is promised. ``packing`` as in Devices.take."""
        self.waiting.remove(trial.name)
        first = devices[0]
        gang = trial.gang > 1
        for device in devices:
            self.devices.take(device, trial.name, packing)
        trial.devices = devices if gang else (first,)
        trial.resizing_to = None if gang or len(devices) == 1 else devices
        trial.share = 1 / self.devices.packing[first]
        trial.first, trial.has_run, trial.settled, trial.cooldown = False, True, False, 0
        trial.speed.restart()
        trial.group.running += 1
        self.running[trial.name] = None
        self._set_status(trial, "running", now)

    def vacate(self, trial: Trial, now: float) -> list[int]:
        """A running trial leaves all it held or was promised, which is returned, and is paused for now."""
        held = trial.held
        for device in held:
            self.devices.leave(device, trial.name)
        trial.devices, trial.resizing_to, trial.share = (), None, 0.0
        trial.group.running -= 1
        del self.running[trial.name]
        self.wide.pop(trial.name, None)
        self.check_back.pop(trial.name, None)
        self._set_status(trial, "paused", now)
        self.reconsider = True
        return held

    def retire(self, trial: Trial, now: float, paused: bool) -> None:
        """A trial that holds nothing leaves its group."""
        if trial.name in self.waiting:
            self.waiting.remove(trial.name)
        trial.group.live.pop(trial.name, None)
        trial.homes = ()
        self.batch.pop(trial.name, None)
        if not paused:
            self.claims.pop(trial.name, None)
        self._set_status(trial, "paused" if paused else "ended", now)
        self.reconsider = True

    def forgo(self) -> None:
        """A trial that was told to suspend and that Tune paused for itself meanwhile does not come back soon.

        One that the shell moves waits again in the same batch of events.
        """
        for name in [name for name in self.claims if self.trials[name].status == "paused"]:
            del self.claims[name]
            self.trials[name].first = False

    def promise(self, trial: Trial, devices: tuple[int, ...]) -> None:
        """An elastic trial is told to change to ``devices``: it holds new and old until it answers."""
        if len(devices) > 1:
            self.devices.make_whole(trial.devices[0])
            trial.share = 1.0
        for device in devices:
            if device not in trial.devices:
                self.devices.take(device, trial.name)
        trial.resizing_to = devices

    def open(self, device: int, count: int) -> None:
        """A device may hold ``count`` trials from now on; its tenants get as much of it as the others will."""
        self.devices.open(device, count)
        for name in self.devices.tenants[device]:
            self.trials[name].share = 1 / count

    def settle(self, trial: Trial, devices: tuple[int, ...]) -> list[Release]:
        """The resize is over: the trial has ``devices`` and gives back the rest of what it held."""
        asked, before = trial.resizing_to, trial.devices
        rest = tuple(device for device in trial.held if device not in devices)
        for device in rest:
            self.devices.leave(device, trial.name)
        trial.devices, trial.resizing_to = devices, None
        if asked is not None and set(asked) != set(devices):
            trial.cooldown = COOLDOWN
        if len(devices) != len(before):
            trial.speed.restart()
        self.note_wide(trial)
        if not rest:
            return []  # nothing was freed, and its own next step waits for its first result
        self.reconsider = True
        return [Release(trial.name, rest)]

    def note_wide(self, trial: Trial) -> None:
        """Keeps ``wide`` right after a change of kind or devices."""
        if trial.kind == "elastic" and trial.gang == 1 and len(trial.devices) > 1:
            self.wide[trial.name] = None
        else:
            self.wide.pop(trial.name, None)

    def suspend(self, trial: Trial, now: float) -> None:
        """The trial is told to leave; it stays until Tune has let go of it, and then comes first."""
        trial.first = True
        self.claims[trial.name] = None
        self._set_status(trial, "suspending", now)

    def note_resize(self, seconds: float) -> None:
        """A resize cost ``seconds``."""
        self._resize_total += seconds
        self._resizes += 1

    @staticmethod
    def _set_status(trial: Trial, status: Status, now: float) -> None:
        trial.status = status
        trial.since = now

    def validate(self) -> None:
        """Asserts every invariant of the books."""
        self.devices.validate()
        self.waiting.validate()
        tenants: dict[str, list[int]] = {}
        for device, names in self.devices.tenants.items():
            for name in names:
                tenants.setdefault(name, []).append(device)
        running = {group: 0 for group in self.groups}
        for name, trial in self.trials.items():
            holds = trial.status in ("running", "suspending")
            assert holds == bool(trial.devices) == bool(trial.share) == (name in self.running), trial
            assert sorted(trial.held) == sorted(tenants.get(name, [])), trial
            assert len(set(trial.devices)) == len(trial.devices), trial
            assert (trial.status == "waiting") == (name in self.waiting), trial
            assert (holds or trial.status == "waiting") == (name in trial.group.live), trial
            assert (name in self.batch) == (name in trial.group.live and trial.group.synchronous), trial
            assert trial.iterations is None or trial.iterations >= 0, trial
            assert trial.cooldown >= 0 and (holds or trial.resizing_to is None), trial
            running[trial.group.name] += holds
            wide = trial.kind == "elastic" and trial.gang == 1 and len(trial.devices) > 1
            assert (name in self.wide) == wide, trial
            if trial.gang > 1:
                assert len(trial.devices) in (0, trial.gang) and trial.resizing_to is None, trial
                assert len({self.devices.node[device] for device in trial.devices}) <= 1, trial
            if trial.status == "suspending":
                assert trial.first and name in self.claims, trial
            if trial.resizing_to is not None:
                assert trial.resizing_to[0] == trial.devices[0], trial
            for device in trial.held:
                shared = self.devices.packing[device]
                assert len(trial.held) == 1 or shared == 1, trial
                assert abs(trial.share - 1 / shared) < 1e-9, trial
        for group in self.groups.values():
            assert group.running == running[group.name], group
        for name in self.claims:
            assert self.trials[name].first and self.trials[name].status in ("suspending", "paused"), name
        assert set(tenants) == set(self.running)

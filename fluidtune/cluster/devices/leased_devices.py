"""A tuning job on a shared cluster: its devices are leases of the Themis arbiter.

`LeasedDevices` is the job's `DeviceSource`: devices come and go as leases do. `Progress` answers the arbiter's
questions from the engine's heights and overheads. themis_bridge decides which job gets which lease; the engine decides
which trial leaves a device, and how.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any

from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.holding import SPARE_S
from fluidtune.cluster.devices.layout import Layout
from fluidtune.engine import Engine
from fluidtune.engine.speed import widest_paying
from fluidtune.errors import FluidTuneError
from themis_bridge import JobInfo, ThemisError, independent_finish_time
from themis_bridge.agent import Gained, Leave
from themis_bridge.bids import Valuation
from themis_bridge.fairness import halving_phases
from themis_bridge.locality import Gpu, Slowdowns, check_together, cut_in_gangs
from themis_bridge.shell.tenant import Tenant

#: Seconds of work that a trial of which nothing is known counts for.
UNKNOWN_S = 60.0
#: Seconds between two looks at the engine.
UPDATE_S = 0.5
#: The median of this many of the latest devices says how long it takes until a device is of use.
LAGS = 9


class Progress:
    """The work that the job has done and has left, as of the last `update`; the agent's thread reads it.

    ``rungs``: the rungs that follow a group, see `fluidtune.tune.groups.Membership`. ``max_workers``: the scaling limit
    d. ``most``: the number of devices that the job may have; None: any. ``together``: how many devices of one node each
    trial needs at once.
    """

    def __init__(
        self,
        engine: Engine,
        rungs: Callable[[str], Iterable[tuple[int, float]]],
        max_workers: int | None,
        most: int | None,
        together: int = 1,
    ):
        self._together = together
        self._engine, self._rungs = engine, rungs
        self._max_workers, self._most = max_workers, most
        self._started = time.monotonic()
        #: The work left, see `Valuation`. Before the first trial comes, a trial of unknown work stands for it, so that
        #: the job gets a device in time.
        self._phases = [[JobInfo(1.0, UNKNOWN_S, together)]]
        self._done = 0.0
        #: The trials at the look with most of them: TrialGroup -> number of elastic trials, and what the others use.
        self._crowd: dict[str, int] = {}
        self._crowd_fixed = self._crowd_size = 0
        #: TrialGroup -> the most devices that one of its elastic trials can use, as of the last look.
        self._widest: dict[str, int] = {}
        self._peak = self.useful
        self._slowdowns = Slowdowns()
        #: Device -> when it came, until a trial has reported a result there; and the seconds that took, of the latest.
        self._came: dict[int, float] = {}
        self._lags: deque[float] = deque(maxlen=LAGS)
        #: Trial -> the number of its iterations at the last look.
        self._seen: dict[str, int] = {}
        #: The jobs of the last look, by their iterations left, seconds per iteration and largest number of devices.
        self._jobs: dict[tuple[float, float, int], JobInfo] = {}
        self._updated = -UPDATE_S

    def update(self, where: dict[int, Gpu]) -> None:
        """Take over the engine's figures; called by the thread that owns the engine. ``where``: each device's GPU."""
        now = time.monotonic()
        if now - self._updated < UPDATE_S:
            return
        self._updated = now
        engine = self._engine
        if not engine.knows_trials:
            return
        groups: dict[str, list[JobInfo]] = {}
        widest: dict[str, int] = {}
        elastic: Counter[str] = Counter()
        fixed = 0
        jobs: dict[tuple[float, float, int], JobInfo] = {}
        self._came = {device: self._came.get(device, now) for device in where}
        for work in engine.works_left(self.lag):
            elastic_one = work.kind == "elastic" and work.gang == 1
            elastic[work.group] += elastic_one
            most = max(work.gang, int(work.width))
            if not elastic_one:
                fixed += most
            if (elastic_one or work.grows) and work.group not in widest:
                pays = widest_paying(engine.group_overheads(work.group)[1])
                widest[work.group] = int(min(pays, self._max_workers or 1_000, self._most or 1_000))
            if work.grows:
                most = widest[work.group]
            # The height of a trial without an end says only what it has done so far.
            seconds = work.height if work.iterations is not None else max(work.height, UNKNOWN_S)
            # Many trials have the same work left, and a `JobInfo` is checked when it is made.
            key = max(seconds, 1e-3) / work.base, work.base, most
            if key not in jobs:
                jobs[key] = self._jobs.get(key) or JobInfo(*key)
            groups.setdefault(work.group, []).append(jobs[key])
            if self._seen.get(work.trial, work.done) != work.done:
                self._learn_lag(work.devices, now)
                if work.width > 1:
                    gpus = [where[device] for device in work.devices if device in where]
                    self._learn(gpus, engine.trial(work.trial).seconds)
            self._seen[work.trial] = work.done
        self._jobs = jobs
        # Brackets run beside each other: the next rungs of all are one phase, the rungs after these the next phase.
        each = [halving_phases(running, self._rungs(name)) for name, running in groups.items()]
        self._phases = [list(chain.from_iterable(phase)) for phase in zip_longest(*each, fillvalue=())]
        self._done = engine.work_done()
        self._widest.update(widest)
        if sum(map(len, groups.values())) >= self._crowd_size:
            self._crowd_size = sum(map(len, groups.values()))
            self._crowd, self._crowd_fixed = dict(elastic), fixed
        self._peak = max(self._crowd_peak(), self.useful)

    def _crowd_peak(self) -> int:
        """The most devices that the job's trials could ever use, by the widths that are known now.

        A guess from before anything was measured must not stay in it: T_id would be too small for the job's whole life.
        """
        most = sum(self._widest[group] * count for group, count in self._crowd.items() if count) + self._crowd_fixed
        return max(1, most if self._most is None else min(most, self._most))

    def _learn(self, gpus: list[Gpu], seconds: dict[float, float]) -> None:
        """Learn what a placement costs from one trial: its iterations there against its iterations on one device."""
        alone, wide = seconds.get(1.0), seconds.get(float(len(gpus)))
        if alone and wide:
            self._slowdowns.measured(gpus[:1], 1.0)
            self._slowdowns.measured(gpus, wide / alone)

    def _learn_lag(self, devices: Sequence[int], now: float) -> None:
        """A trial has reported a result on these devices. The first one on a device to which it has grown counts.

        Not that on its own first device: when a job begins, many processes start at once, and each takes longer.
        """
        for device in devices:
            came = self._came.get(device, math.inf)
            if came < now and len(devices) > 1:
                self._lags.append(now - came)
            self._came[device] = math.inf

    @property
    def lag(self) -> float:
        """Seconds from the moment at which a device comes until a trial that has grown to it reports a result.

        It holds the start of a process, an iteration, and the rest of the one after which a trial grows to the device.
        0 while nothing is known. A job does not ask for devices that would come too late.
        """
        return statistics.median(self._lags) if self._lags else 0.0

    @property
    def useful(self) -> int:
        """The most devices that the job's trials could use now."""
        useful = sum(job.max_gpus for jobs in self._phases[:1] for job in jobs)
        if self._most is not None:
            useful = min(useful, self._most)
        return useful - useful % self._together

    def valuation(self, contention: float, cluster_gpus: int) -> Valuation:
        phases = self._phases
        budget = self._done + sum(job.work for jobs in phases for job in jobs)
        budget, gpus = max(budget, 1e-3), max(1, cluster_gpus)
        independent = independent_finish_time(budget, gpus, self._peak, contention)
        whole = independent_finish_time(budget, gpus, self._peak, 1.0)
        elapsed = time.monotonic() - self._started
        return Valuation(phases, elapsed, independent, self._slowdowns, self._most, whole, self._together)


class LeasedDevices(DeviceSource):
    """Its devices are leases of the arbiter. A lease that is over counts as lost.

    ``app``: the job's name at the arbiter. ``in_use``: whether anything runs on a device. ``user``: whose job it is;
    "": it is the only one of its user.

    Raises:
        FluidTuneError: a device of this job is not one whole GPU (or core), a trial needs more at once than
            a gang has, or the arbiter refuses the job, for example because it has an app of that name.
    """

    def __init__(self, plan: Layout, app: str, progress: Progress, in_use: Callable[[int], bool], user: str = ""):
        unit = "CPU" if plan.kind == "cpu" else "GPU"
        if plan.bundle.get(unit) != 1.0:
            raise FluidTuneError(
                f"a trial asks for {plan.bundle.get(unit, 0):g} {unit}s for one device; the arbiter leases "
                f"single ones: ask for 1 {unit} per trial, or run without arbiter"
            )
        self._together = max(1, int(plan.share))
        try:
            check_together(self._together)
        except ThemisError as error:
            raise FluidTuneError(f"a trial asks for {error}, or run without arbiter") from error
        self._progress, self._in_use = progress, in_use
        try:
            self._tenant = Tenant(app, progress, plan.bundle, unit, user, self._together)
        except ThemisError as error:
            raise FluidTuneError(str(error)) from error
        self.nodes: dict[int, str] = {}
        #: Device -> its lease; the same keys as `nodes`.
        self._leases: dict[int, Gained] = {}
        #: GPU -> its device number, which it keeps: the same GPU may come back under another lease.
        self._numbers: dict[str, int] = {}
        #: Devices whose leases end and are not renewed -> whether `leaving` has named them.
        self._ending: dict[int, bool] = {}
        #: Device -> the placement group of its lease, from the first time that `group` was asked for it.
        self._groups: dict[int, Any] = {}
        #: Devices whose placement group a worker found removed.
        self._revoked: set[int] = set()
        #: Device -> the time since which the job has had no use for it.
        self._spare: dict[int, float] = {}

    def group(self, device: int) -> Any:
        if device not in self._groups:
            lease = self._leases[device]
            self._groups[device] = self._tenant.group(lease.gpu.id, lease.token)
        return self._groups[device]

    def leaving(self) -> list[int]:
        """The devices whose leases end soon, each once."""
        new = [device for device, named in self._ending.items() if not named]
        self._ending.update(dict.fromkeys(new, True))
        return new

    def revoked(self, device: int, group: Any) -> None:
        """The device's lease is over, even if the arbiter's message has not come yet."""
        if device in self._groups and self._groups[device] == group:
            self._revoked.add(device)

    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        """A device whose lease is not renewed is gone as soon as nothing runs on it.

        Raises:
            FluidTuneError: the arbiter has refused this job.
        """
        deadline = time.monotonic() + wait_s
        came: dict[int, str] = {}
        gone: list[int] = []
        while True:
            self._take_notices(came, gone)
            self._progress.update({device: lease.gpu for device, lease in self._leases.items()})
            self._give_back(came, gone)
            if came or time.monotonic() >= deadline:
                return came, gone
            time.sleep(0.05)

    def _take_notices(self, came: dict[int, str], gone: list[int]) -> None:
        try:
            notices = self._tenant.poll()
        except ThemisError as error:
            raise FluidTuneError(str(error)) from error
        for notice in notices:
            if isinstance(notice, Gained):
                device = self._numbers.setdefault(notice.gpu.id, len(self._numbers))
                self._leases[device] = notice
                self._groups.pop(device, None)
                self._revoked.discard(device)
                came[device] = self.nodes[device] = notice.gpu.machine
                continue
            device = self._numbers.get(notice.gpu.id, -1)  # type: ignore[attr-defined]
            lease = self._leases.get(device)
            if lease is None or lease.token != notice.token:  # type: ignore[attr-defined]
                continue
            if isinstance(notice, Leave):
                self._ending.setdefault(device, False)
            else:
                self._drop(device, came, gone)
        for device in sorted(self._revoked):
            self._leave(device, came, gone)

    def _give_back(self, came: dict[int, str], gone: list[int]) -> None:
        """Give back devices that end and are empty, and devices that the job has had no use for."""
        now = time.monotonic()
        idle = [device for device in self._leases if device not in came and not self._in_use(device)]
        loose = self._loose(idle)
        surplus = max(0, len(self._leases) - len(loose) - max(1, self._progress.useful))
        surplus -= surplus % self._together
        self._spare = {device: self._spare.get(device, now) for device in idle if surplus or device in loose}
        # A gang lies on one node, and what is left of it would be of no use.
        nodes = self.nodes if self._together > 1 else {}
        for device in sorted(idle, key=lambda device: (device not in loose, nodes.get(device, ""), -device)):
            useless = surplus > 0 or device in loose
            over = useless and now - self._spare.get(device, now) >= SPARE_S
            if over or self._ending.get(device):
                self._leave(device, came, gone)
                surplus -= device not in loose

    def _loose(self, idle: Sequence[int]) -> set[int]:
        """Of these idle devices, those that are part of no whole gang, if the rest of it is not on its way."""
        if self._together == 1 or self._tenant.expects:
            return set()
        # Those in use come first, and so make the gangs.
        order = [*(device for device in self.nodes if device not in idle), *idle]
        _, torn = cut_in_gangs({device: self.nodes[device] for device in order}, self._together)
        return set(torn) & set(idle)

    def _leave(self, device: int, came: dict[int, str], gone: list[int]) -> None:
        lease = self._leases[device]
        self._tenant.vacated(lease.gpu.id, lease.token)
        self._drop(device, came, gone)

    def _drop(self, device: int, came: dict[int, str], gone: list[int]) -> None:
        if came.pop(device, None) is None:
            gone.append(device)
        self._ending.pop(device, None)
        self._groups.pop(device, None)
        self._revoked.discard(device)
        del self._leases[device], self.nodes[device]

    def close(self) -> None:
        self.nodes.clear()
        self._leases.clear()
        self._groups.clear()
        self._tenant.close()

"""The work that a job on a shared cluster has done and has left, by which the Themis arbiter makes its bids.

`JobProgress` computes it from the engine's heights and overheads.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain, zip_longest

from fluidtune.engine import Engine
from themis_bridge import JobInfo
from themis_bridge.fairness import halving_phases, kinds_of
from themis_bridge.locality import Gpu, Slowdowns
from themis_bridge.messages import MOST_GPUS, Report

#: Seconds of work that a trial of which nothing is known counts for.
UNKNOWN_S = 60.0
#: Seconds between two looks at the engine.
UPDATE_S = 0.5
#: The median of this many of the latest devices says how long it takes until a device is of use.
LAGS = 9
#: Many trials have the same work left, and a `JobInfo` is checked when it is made.
_job = lru_cache(maxsize=4096)(JobInfo)


class JobProgress:
    """The work that the job has done and has left, as of the last `update`; the agent's thread reads it.

    ``rungs``: the rungs that follow a group, see `fluidtune.tune.groups.Membership`. ``most``: the number of devices
    that the job may have; None: any. ``together``: how many devices of one node each trial needs at once.
    """

    def __init__(
        self,
        engine: Engine,
        rungs: Callable[[str], Iterable[tuple[int, float]]],
        most: int | None,
        together: int = 1,
    ):
        self._together = together
        self._engine, self._rungs = engine, rungs
        self._most, self._limit = most, MOST_GPUS if most is None else most
        #: The work left, see `Report`. Before the first trial comes, a trial of unknown work stands for it, so that
        #: the job gets a device in time.
        self._phases = [[JobInfo(1.0, UNKNOWN_S, together)]]
        self._done = 0.0
        #: Trial of the look with most trials -> its group, and the most devices that it could ever use, newest known.
        self._crowd: dict[str, tuple[str, int]] = {}
        #: TrialGroup -> the most devices that any of its trials could ever use, as of its last look.
        self._widest: dict[str, int] = {}
        self._peak = self.useful
        self._slowdowns = Slowdowns()
        self._report = self._made_report()
        #: Device -> when it came, until a trial has reported a result there; and the seconds that took, of the latest.
        self._came: dict[int, float] = {}
        self._lags: deque[float] = deque(maxlen=LAGS)
        #: Trial -> the number of its iterations at the last look.
        self._seen: dict[str, int] = {}
        self._updated = -UPDATE_S

    def update(self, where: dict[int, Gpu], now: float) -> None:
        """Take over the engine's figures; called by the thread that owns the engine. ``where``: each device's GPU."""
        if now - self._updated < UPDATE_S:
            return
        self._updated = now
        engine = self._engine
        if not engine.knows_trials:
            return
        groups: dict[str, list[JobInfo]] = {}
        crowd: dict[str, tuple[str, int]] = {}
        widest: dict[str, int] = {}
        self._came = {device: self._came.get(device, now) for device in where}
        for work in engine.works_left(self._limit, self.lag):
            crowd[work.trial] = work.group, work.widest
            widest[work.group] = max(widest.get(work.group, 1), work.widest)
            # The height of a trial without an end says only what it has done so far.
            seconds = work.height if work.iterations is not None else max(work.height, UNKNOWN_S)
            groups.setdefault(work.group, []).append(_job(max(seconds, 1e-3) / work.base, work.base, work.useful))
            if self._seen.get(work.trial, work.done) != work.done:
                self._learn_lag(work.devices, now)
                if len(work.devices) > 1:
                    gpus = [where[device] for device in work.devices if device in where]
                    self._learn(gpus, engine.trial(work.trial).seconds)
            self._seen[work.trial] = work.done
        # Brackets run beside each other: the next rungs of all are one phase, the rungs after these the next phase.
        each = [halving_phases(running, self._rungs(name)) for name, running in groups.items()]
        self._phases = [list(chain.from_iterable(phase)) for phase in zip_longest(*each, fillvalue=())]
        self._done = engine.work_done()
        self._widest |= widest
        if len(crowd) >= len(self._crowd):
            self._crowd = crowd
        self._crowd |= {trial: crowd[trial] for trial in crowd.keys() & self._crowd.keys()}
        self._peak = max(self._crowd_peak(), self.useful)
        self._report = self._made_report()

    def _crowd_peak(self) -> int:
        """The most devices that the job's trials could ever use, by the widths that are known now.

        A guess from before anything was measured must not stay in it: T_id would be too small for the job's whole life.
        So a trial that has ended counts for no more than the widest of its group.
        """
        most = sum(min(most, self._widest[group]) for group, most in self._crowd.values())
        return max(1, min(most, self._limit))

    def _learn(self, gpus: list[Gpu], seconds: dict[float, float]) -> None:
        """Learn what a placement costs from one trial: its iterations there against its iterations on one device."""
        alone, wide = seconds.get(1.0), seconds.get(float(len(gpus)))
        if alone and wide:
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
        useful = min(self._limit, sum(job.max_gpus for jobs in self._phases[:1] for job in jobs))
        return useful - useful % self._together

    def report(self) -> Report:
        return self._report

    def _made_report(self) -> Report:
        phases, across = tuple(map(kinds_of, self._phases)), self._slowdowns.across
        return Report(phases, self._done, max(1, self._peak), self._most, across)

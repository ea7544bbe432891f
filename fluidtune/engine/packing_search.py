"""How the packing limit c is found while trials train (eq. 3.1; dissertation, 3.4.2.2), and which devices are shared.

When trials wait and no device is idle, *one* device gets one trial more than c: an *attempt*. The iterations there are
compared with iterations of trials that are alone, and this says whether one trial more pays. If it pays, c grows by
one, every device may hold that number of trials, and the next number is tried. If it does not, one trial leaves the
device again and the search is over. So a wrong attempt costs one device a few iterations. Trials that start together
are tried first, since their first iterations count already. An attempt begins only when the memory of a trial is known
and one trial more fits the memory. docs/engine.md explains the terms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from fluidtune.engine.estimates import base_seconds, current_width
from fluidtune.engine.messages import Instruction, Start, Suspend
from fluidtune.engine.placing import start_trial
from fluidtune.engine.reasons import Reason, Why, because
from fluidtune.engine.resizing import LOOK_AGAIN
from fluidtune.engine.speed import TRIALS_REMEMBERED
from fluidtune.engine.state import State
from fluidtune.engine.trial import ROUNDING, Trial
from fluidtune.engine.width_rules import most_sharing
from fluidtune.planning.loads import PACKING_THRESHOLD, marginal_benefit

#: The largest c that is tried if the shell does not say less. Judgement: for this a device reserves four trials' cores.
SEARCH_LIMIT = 4
#: The part of a device's memory that may be given out.
MEMORY = 0.95
#: Measured iterations that are enough to accept a number of trials.
ENOUGH_TO_ACCEPT = 2
#: Iterations that a trial must have left to take part in an attempt while it trains: one that does not count, since the
#: newcomer came during it, and ENOUGH_TO_ACCEPT.
LONG = 1 + ENOUGH_TO_ACCEPT
#: The search is over after this many attempts whose trials ended before anything was measured.
TRIES = 20
#: Measured iterations that are enough to reject a number of trials. The first number counts only iterations of trials
#: that were timed alone, the second counts those of all trials. The second is larger, since a trial that was never
#: timed alone may be slow by itself.
ENOUGH_TO_REJECT, ENOUGH_OF_ANY_TO_REJECT = 3, 6
#: One iteration among p trials ends the attempt at once if it takes longer than HOPELESS * p times an iteration alone.
#: For a trial that was never timed alone the limit is twice as large.
HOPELESS = 1.5
#: Hopeless attempts after which the search is over.
LAST_HOPELESS = 2
#: The newest samples that are kept while it is not known which trials were there, as while a newcomer does a first
#: iteration of hours. It is many times what is enough to decide, and all of them are looked at again at each event.
UNDECIDED = 100
#: An iteration counts if the same trials were on the device for all of it but this part.
MIXED = 0.1


@dataclass
class Stay:
    """The time of one trial on the device of an attempt, in engine time."""

    #: When its first iteration there began, and when it left the device; None: not yet.
    began: float | None = None
    left: float | None = None
    #: It was there before the attempt, so its present iteration began without the newcomer and does not count.
    before: bool = False


@dataclass(frozen=True)
class Sample:
    """An iteration on the device of an attempt: it took ``seconds`` until ``end``, and alone would take ``alone``."""

    trial: str
    end: float
    seconds: float
    alone: float
    #: ``alone`` was measured of the trial itself, not of others.
    timed_alone: bool


@dataclass
class Attempt:
    """One more trial than c on one device."""

    #: How many trials the device then holds.
    tried: int
    device: int
    #: The trial that came last.
    newcomer: str
    #: Every trial that was on the device during the attempt.
    stays: dict[str, Stay]
    #: The newest iterations for which it is not known yet which trials were on the device meanwhile.
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=UNDECIDED))
    #: Some iteration counted.
    measured: bool = False


class PackingSearch:
    """The books of the search for c."""

    def __init__(self, limit: int) -> None:
        #: The largest c that may be tried.
        self.limit = limit
        #: The largest part of a device's memory that any trial has needed so far; None while nothing is known.
        self.memory: float | None = None
        #: The attempt under way; None between two.
        self.attempt: Attempt | None = None
        #: Nothing more is tried.
        self.over = False
        #: By number of trials on a device: the seconds of each iteration divided by the seconds that it takes alone.
        #: ``ratios`` has the trials that were timed alone; ``estimated_ratios`` has the others.
        self.ratios: dict[int, list[float]] = {}
        self.estimated_ratios: dict[int, list[float]] = {}
        #: Seconds of trials' first iterations, alone on a device.
        self.first_seconds: deque[float] = deque(maxlen=TRIALS_REMEMBERED)
        #: Calls to skip before searching again for a device whose trials are timed; the last search found none. See
        #: `resizing.LOOK_AGAIN`.
        self.calls_before_look = 0
        #: Attempts that ended before anything was measured, and those that ended at a hopeless iteration.
        self.unmeasured = 0
        self.hopeless = 0

    @property
    def ceiling(self) -> int:
        """How many trials a device may hold by ``limit`` and by the largest memory seen; 1 while no memory is known."""
        if self.memory is None:
            return 1
        if not self.memory:
            return self.limit
        return max(1, min(self.limit, int(MEMORY / self.memory + ROUNDING)))

    def ended(self, c: int) -> bool:
        """Whether ``c`` grows no more: the search is over, or a device may hold no more by ``limit`` or its memory."""
        return self.over or c >= (self.limit if self.memory is None else self.ceiling)

    def record_memory(self, memory: float) -> None:
        """A trial needs this part of a device's memory."""
        self.memory = max(self.memory or 0.0, memory)


def let_trials_join(state: State, now: float) -> list[Instruction]:
    """Lets waiting trials join trials that run: up to c on every device, and beyond c on one device for an attempt."""
    out: list[Instruction] = []
    search, slots = state.search, state.c
    if search is not None:
        slots = min(slots, search.ceiling)
    if state.devices.idle or (search is None and slots == 1):
        return out
    while (trial := _next_trial(state)) is not None and most_sharing(state, trial) >= slots:
        device = _find_device(state, trial, slots)
        if device is None:
            break
        there = len(state.devices.tenants[device]) + 1
        why = because(Reason.PACKING, waiting=len(state.waiting), there=there, limit=slots)
        out.append(_join(state, trial, device, slots, now, why))
    if search is not None and not search.over and search.attempt is None and slots < search.ceiling:
        out += _begin_attempt(state, search, slots + 1, now, joined=bool(out))
    return out


def _begin_attempt(state: State, search: PackingSearch, tried: int, now: float, *, joined: bool) -> list[Instruction]:
    """Starts the next trial on a device that then holds ``tried``, if there is a suitable one.

    ``joined``: trials have just joined devices; then only trials that start together are tried.
    """
    trial = _next_trial(state)
    if trial is None:
        return []
    device = None
    if trial.kind != "plain" and search.first_seconds:
        device = _find_device(state, trial, tried, started=now)
    if device is None and not joined and _is_long(trial):
        search.calls_before_look -= 1
        if search.calls_before_look < 0:
            device = _find_device(state, trial, tried, timed=True)
            search.calls_before_look = 0 if device is not None else len(state.devices) // LOOK_AGAIN
    if device is None:
        return []
    stays = {}
    for name in state.devices.tenants[device]:
        stays[name] = Stay(now, before=True) if state.trials[name].settled else Stay()
    stays[trial.name] = Stay()
    search.attempt = Attempt(tried, device, trial.name, stays)
    why = because(Reason.PACKING_SAMPLED, waiting=len(state.waiting), tried=tried, limit=state.c)
    return [_join(state, trial, device, tried, now, why)]


def note_iteration(state: State, trial: Trial, seconds: float, now: float) -> None:
    """``trial`` has just done an iteration; ``trial.settled`` still says whether it had done one since it started."""
    search = state.search
    if search is None or search.over:
        return
    attempt = search.attempt
    stay = attempt.stays.get(trial.name) if attempt is not None else None
    if attempt is None or stay is None or stay.left is not None:
        if not trial.settled and len(trial.devices) == 1 and current_width(state, trial) == 1:
            search.first_seconds.append(seconds)
        return
    if stay.before:
        stay.before = False
        return
    if stay.began is None:
        stay.began = now - seconds
    own = trial.speed.base_seconds()
    first = not trial.settled
    others = median(search.first_seconds) if first and search.first_seconds else trial.group.speed.base_seconds()
    alone = own if own is not None and (not first or trial.speed.count(1)) else others
    if alone:
        attempt.samples.append(Sample(trial.name, now, seconds, alone, own is not None))


def judge_attempt(state: State, now: float) -> list[Instruction]:
    """Ends the attempt when enough is measured, or when its trials have gone. A rejected trial is suspended."""
    search = state.search
    if search is None or search.attempt is None:
        return []
    attempt = search.attempt
    here = state.devices.tenants.get(attempt.device, [])
    for name, stay in attempt.stays.items():
        if stay.left is None and name not in here:
            stay.left = now
    _weigh_samples(search, attempt)
    hopeless = _hopeless(search, attempt.tried)
    accepted = None if hopeless else _accepted(search, attempt.tried)
    if accepted is None and not hopeless:
        if sum(stay.left is None for stay in attempt.stays.values()) < attempt.tried:
            _end_attempt(search, attempt)
        return []
    _end_attempt(search, attempt)
    if accepted:
        state.c = attempt.tried
        return []
    reason, numbers = _rejection(search, attempt.tried)
    if hopeless:
        search.ratios.pop(attempt.tried, None)
        search.estimated_ratios.pop(attempt.tried, None)
        search.hopeless += 1
    search.over = not hopeless or search.hopeless == LAST_HOPELESS
    if attempt.stays[attempt.newcomer].left is not None or state.trials[attempt.newcomer].status != "running":
        return []
    # The newcomer leaves if it can be moved, else one of those that it joined.
    for name in (attempt.newcomer, *(name for name in here if name != attempt.newcomer)):
        trial = state.trials[name]
        if trial.kind != "plain" and trial.steady:
            state.suspend(trial, now)
            alone = trial.speed.base_seconds() or trial.group.speed.base_seconds() or base_seconds(state, trial)
            return [Suspend(name, why=because(reason, alone=alone, **numbers))]
    return []


def _end_attempt(search: PackingSearch, attempt: Attempt) -> None:
    if not attempt.measured:
        search.unmeasured += 1
        search.over = search.unmeasured >= TRIES
    search.attempt = None


def _weigh_samples(search: PackingSearch, attempt: Attempt) -> None:
    """Turns samples into ratios where it is known by now which trials were there.

    A sample during which a trial came or left is dropped.
    """
    undecided: list[Sample] = []
    for sample in attempt.samples:
        present = _trials_present(attempt, sample)
        if present is None:
            undecided.append(sample)
        elif present == attempt.tried:
            ratios = search.ratios if sample.timed_alone else search.estimated_ratios
            ratios.setdefault(present, []).append(sample.seconds / sample.alone)
            attempt.measured = True
    attempt.samples = deque(undecided, UNDECIDED)


def _trials_present(attempt: Attempt, sample: Sample) -> int | None:
    """How many trials were on the device during the whole sample; 0 if one came or left, None: not known yet."""
    present = 1
    begin = sample.end - sample.seconds
    for other, stay in attempt.stays.items():
        if other == sample.trial:
            continue
        if stay.began is None and stay.left is None:
            return None  # the other trial may have been loading then, or training already
        since = stay.began if stay.began is not None else sample.end
        until = stay.left if stay.left is not None else sample.end
        shared = min(until, sample.end) - max(since, begin)
        if shared >= (1 - MIXED) * sample.seconds:
            present += 1
        elif shared > MIXED * sample.seconds:
            return 0
    return present


def _hopeless(search: PackingSearch, tried: int) -> tuple[float, float] | None:
    """The ratio of an iteration that was so slow that no more are needed, and the limit; None without such one."""
    for ratios, most in ((search.ratios, HOPELESS * tried), (search.estimated_ratios, 2 * HOPELESS * tried)):
        slowest = max(ratios.get(tried, []), default=0.0)
        if slowest > most:
            return slowest, most
    return None


def _measured(search: PackingSearch, tried: int) -> list[float]:
    """The ratios by which ``tried`` trials are judged: those of trials timed alone if they are enough, else all."""
    own = search.ratios.get(tried, [])
    return own if len(own) >= ENOUGH_TO_ACCEPT else own + search.estimated_ratios.get(tried, [])


def _benefit(search: PackingSearch, tried: int) -> float:
    """What the last of ``tried`` trials adds (eq. 3.1), by what was measured."""
    fewer = search.ratios.get(tried - 1) or search.estimated_ratios.get(tried - 1) or [1.0]
    return marginal_benefit(tried, median(_measured(search, tried)), median(fewer))


def _accepted(search: PackingSearch, tried: int) -> bool | None:
    """Whether ``tried`` trials on a device pay (eq. 3.1); None: not enough is measured."""
    own, estimated = search.ratios.get(tried, []), search.estimated_ratios.get(tried, [])
    if len(_measured(search, tried)) < ENOUGH_TO_ACCEPT:
        return None
    # Only the step from tried - 1 to ``tried`` has to pay: the steps before it were found to pay.
    if _benefit(search, tried) > PACKING_THRESHOLD:
        return True
    return False if len(own) >= ENOUGH_TO_REJECT or len(own) + len(estimated) >= ENOUGH_OF_ANY_TO_REJECT else None


def _rejection(search: PackingSearch, tried: int) -> tuple[Reason, dict[str, float]]:
    """Why ``tried`` trials are too many for a device: the reason, and its numbers but for ``alone``."""
    hopeless = _hopeless(search, tried)
    if hopeless:
        return Reason.PACKING_HOPELESS, {"tried": tried, "ratio": hopeless[0], "most": hopeless[1]}
    found = _measured(search, tried)
    numbers = {"samples": len(found), "ratio": median(found), "benefit": _benefit(search, tried)}
    return Reason.PACKING_REJECTED, {"tried": tried, "least": PACKING_THRESHOLD, **numbers}


def _next_trial(state: State) -> Trial | None:
    """The trial that would start next if there were a device, unless it asks for more or less than one device."""
    line = state.waiting.next_line([], 1 << 30)
    if line is None or line.gang > 1 or state.held_node is not None or line.group.places <= 0:
        return None
    trial = line.trials[0]
    return trial if trial.asked_share == 1 else None


def _find_device(
    state: State, newcomer: Trial, slots: int, timed: bool = False, started: float | None = None
) -> int | None:
    """A device with fewer than ``slots`` trials that ``newcomer`` may join; None if there is none.

    For an attempt it must hold exactly one fewer, and its trials must be ``timed`` (how fast such trials are alone is
    known), or have ``started`` at this very time.
    """
    devices = state.devices
    if started is not None:
        among: Iterable[int] = devices.first_gained(_just_started(state, started))
    else:
        among = devices.loaded_devices(slots - 1 if timed else 1, slots - 1)
    found: dict[int, list[Trial]] = {}
    for device in among:
        trials = state.tenants_of(device)
        free_to_join = all(trial.steady and len(trial.held) == 1 and trial.asked_share == 1 for trial in trials)
        if not free_to_join or (timed and not all(map(_is_timed, trials))):
            continue
        if started is not None:
            new = all(trial.since == started and not trial.settled for trial in trials)
            if not new or len(trials) != slots - 1 or device in devices.leaving:
                continue
        if state.sharing is None:
            return device
        found[device] = trials
    return None if state.sharing is None else state.sharing.choose_device(newcomer, found)


def _just_started(state: State, now: float) -> Iterator[int]:
    """First devices of the trials that started ``now``, the newest first."""
    for name in reversed(state.running):
        trial = state.trials[name]
        if trial.since != now:
            return
        yield trial.devices[0]


def _is_timed(trial: Trial) -> bool:
    """Whether it can be moved, has enough iterations left, and the speed of such trials alone is known."""
    return trial.kind != "plain" and _is_long(trial) and trial.group.speed.base_seconds() is not None


def _is_long(trial: Trial) -> bool:
    return trial.iterations is None or trial.iterations >= LONG


def _join(state: State, trial: Trial, device: int, slots: int, now: float, why: Why) -> Start:
    state.divide_device(device, slots)
    return start_trial(state, trial, (device,), slots, now, why)

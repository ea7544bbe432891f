"""How many trials may share a device: given, or found out while they train (eq. 3.1, dissertation 3.4.2.2).

Found out: when trials wait and every device has one, *one* device is opened for one more. What its tenants then
take per iteration against before says whether that pays; if so every device may hold as many and the next
number is tried, if not the newcomer leaves and the search is over. So a wrong try costs one device a few
iterations. A share that would not fit the memory, or of which that is not known, is not tried.
"""

from __future__ import annotations

from fluidtune.engine.messages import Instruction, Start, Suspend
from fluidtune.engine.placing import start
from fluidtune.engine.state import Search, State
from fluidtune.engine.trial import Trial

#: What one more trial must add, O(p) of eq. 3.1.
THRESHOLD = 0.05
#: More than so many on a device are not tried, if the shell does not say less.
MOST_PACKED = 4
#: The part of a device's memory that may be given out.
MEMORY = 0.95
#: Iterations that a trial must have left to take part in a try: one that is mixed, two that count.
LONG = 3
#: Tries that may end before anything is measured, because their trials end.
TRIES = 20
#: A tenant that becomes so many times slower than p trials in turn would be: no need to wait for a second result.
HOPELESS = 1.5


def seek(state: State, now: float) -> list[Instruction]:
    """Opens devices for trials that wait, up to what is known to pay, and one device beyond it for a try."""
    out: list[Instruction] = []
    search = state.search
    if search is None or state.devices.idle:
        return out
    fits = _fitting(state)
    while (trial := _next(state)) is not None:
        device = _candidate(state, trial, state.max_packing, fits)
        if device is None:
            break
        out.append(_join(state, trial, device, state.max_packing, now))
    if out or search.over or search.count or state.max_packing + 1 > fits:
        return out
    trial = _next(state)
    if trial is None or not _long(trial):
        return out
    device = _candidate(state, trial, state.max_packing + 1, fits, measured=True)
    if device is not None:
        search.count, search.device = state.max_packing + 1, device
        search.newcomer, search.tenants = trial.name, tuple(state.devices.tenants[device])
        out.append(_join(state, trial, device, search.count, now))
    return out


def judge(state: State, now: float) -> list[Instruction]:
    """Ends a try when enough is measured, or when its trials went."""
    search = state.search
    if search is None or not search.count:
        return []
    here = state.devices.tenants.get(search.device, [])
    if search.newcomer not in here or not set(search.tenants) <= set(here):
        search.count = 0
        search.spoilt += 1
        search.over = search.spoilt >= TRIES
        return []
    verdict = _verdict(state, search)
    if verdict is None:
        return []
    if verdict:
        state.max_packing, search.count = search.count, 0
        return []
    search.count, search.over = 0, True
    newcomer = state.trials[search.newcomer]
    if newcomer.status != "running":
        return []
    state.suspend(newcomer, now)
    return [Suspend(newcomer.name)]


def _verdict(state: State, search: Search) -> bool | None:
    p = search.count
    before = 1.0 if p == 2 else state.pool.measured_ratio(1 / (p - 1))
    if before is None:
        return None
    for name in search.tenants:
        speed = state.trials[name].speed
        base, seconds = state.base(state.trials[name]), speed.seconds(1 / p)
        if seconds and seconds > HOPELESS * p * base:
            return False
    ratio = state.pool.measured_ratio(1 / p)
    if ratio is None:
        return None
    # Eq. 3.1 for the last step alone: those before it were found to pay.
    return 1 - (p - 1) / p * ratio / before > THRESHOLD


def _next(state: State) -> Trial | None:
    """The trial that would start next if there were a device, unless it asks for something special."""
    line = state.waiting.next_line([], 1 << 30)
    if line is None or line.gang > 1 or state.hold is not None or state.may_start(line.group) <= 0:
        return None
    trial = state.trials[line.entries[0][2]]
    return trial if trial.asked_share == 1 else None


def _candidate(state: State, newcomer: Trial, count: int, fits: int, measured: bool = False) -> int | None:
    """A device that holds ``count`` - 1 trials and has room for one more; ``measured``: whose speeds are known."""
    if count < 2 or count > fits:
        return None
    for device, tenants in state.devices.tenants.items():
        if len(tenants) != count - 1:
            continue
        trials = [state.trials[name] for name in tenants]
        if not all(map(_stays, trials)) or not state.has_room(device, newcomer):
            continue
        if not measured or all(_measured(trial) for trial in trials):
            return device
    return None


def _stays(trial: Trial) -> bool:
    one = trial.status == "running" and len(trial.held) == 1
    return one and trial.asked_share == 1 and trial.resizing_to is None


def _measured(trial: Trial) -> bool:
    """It can be moved, will be there for long enough, and how fast such trials are alone is known."""
    return trial.kind != "plain" and _long(trial) and trial.group.pool.base() is not None


def _long(trial: Trial) -> bool:
    return trial.iterations is None or trial.iterations >= LONG


def _fitting(state: State) -> int:
    """How many trials a device may hold, by the largest that was seen; 1 while its memory is not known."""
    if state.memory is None:
        return 1
    return min(state.most_packed, int(MEMORY / state.memory + 1e-9)) if state.memory else state.most_packed


def _join(state: State, trial: Trial, device: int, count: int, now: float) -> Start:
    state.open(device, count)
    return start(state, trial, (device,), count, now)

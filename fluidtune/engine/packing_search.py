"""How many trials may share a device: given, or found out while they train (eq. 3.1, dissertation 3.4.2.2).

Found out: when trials wait and every device has one, *one* device is opened for one more. What iterations there
then take against alone says whether that pays; if so every device may hold as many and the next number is tried, if
not the newcomer leaves, or a neighbour where that one cannot be moved, and the search is over. So a wrong try costs
one device a few iterations. Trials that start together are tried best: their first iterations count already. A share
that would not fit the memory, or of which that is not known, is not tried.
"""

from __future__ import annotations

from statistics import median

from fluidtune.engine.messages import Instruction, Start, Suspend
from fluidtune.engine.placing import start
from fluidtune.engine.state import Search, State, Stay
from fluidtune.engine.trial import Trial

#: What one more trial must add, O(p) of eq. 3.1.
THRESHOLD = 0.05
#: More than so many on a device are not tried, if the shell does not say less.
MOST_PACKED = 4
#: Iterations that a trial must have left to join, or be joined, while it trains: one that is mixed, two that count.
LONG = 3
#: Tries that may end before anything is measured, because their trials end.
TRIES = 20
#: Iterations that say yes, and that say no. Of trials that never were alone more are needed, as they may be dear ones.
YES, NO, NO_OF_STRANGERS = 2, 3, 6
#: So many times slower than p trials in turn would be: one iteration ends the try. (Of a stranger twice that.)
HOPELESS = 1.5
#: Tries that end so; one may be a single slow iteration.
LAST_HOPELESS = 2
#: An iteration counts if its company was the same for all of it but this part.
MIXED = 0.1


def seek(state: State, now: float) -> list[Instruction]:
    """Opens devices for trials that wait, up to what is known to pay, and one device beyond it for a try."""
    out: list[Instruction] = []
    search, count = state.search, state.max_packing
    if search is not None:
        count = min(count, state.fits)
    if state.devices.idle or (search is None and count == 1):
        return out
    while (trial := _next(state)) is not None and state.packing_limit(trial) >= count:
        device = _candidate(state, trial, count)
        if device is None:
            break
        out.append(_join(state, trial, device, count, now))
    count += 1
    if search is None or search.over or search.count or count > state.fits:
        return out
    trial = _next(state)
    device = None
    if trial is not None and trial.kind != "plain" and search.firsts:
        device = _candidate(state, trial, count, together=now)
    if trial is not None and device is None and not out and _long(trial):
        device = _candidate(state, trial, count, measured=True)
    if trial is not None and device is not None:
        search.count, search.device, search.newcomer = count, device, trial.name
        before = (state.trials[name] for name in state.devices.tenants[device])
        search.stays = {one.name: Stay(now, before=True) if one.settled else Stay() for one in before}
        search.stays[trial.name] = Stay()
        out.append(_join(state, trial, device, count, now))
    return out


def note(state: State, trial: Trial, seconds: float, now: float) -> None:
    """Takes one iteration; ``trial.settled`` still says whether there was one before it since the trial started."""
    search = state.search
    if search is None or search.over:
        return
    stay = search.stays.get(trial.name) if search.count else None
    if stay is None or stay.left is not None:
        if not trial.settled and state.width(trial) == 1 and len(trial.devices) == 1:
            search.firsts.append(seconds)
        return
    if stay.before:
        stay.before = False
        return
    if stay.began is None:
        stay.began = now - seconds
    own = trial.speed.base()
    others = trial.group.pool.base() if trial.settled or not search.firsts else median(search.firsts)
    alone = own if own is not None and (trial.settled or trial.speed.count(1)) else others
    if alone:
        search.pending.append((trial.name, now, seconds, alone, own is not None))


def judge(state: State, now: float) -> list[Instruction]:
    """Ends a try when enough is measured, or when its trials went."""
    search = state.search
    if search is None or not search.count:
        return []
    here = state.devices.tenants.get(search.device, [])
    for name, stay in search.stays.items():
        if stay.left is None and name not in here:
            stay.left = now
    _weigh(search)
    hopeless = _hopeless(search)
    verdict = None if hopeless else _verdict(search)
    if verdict is None and not hopeless:
        if sum(stay.left is None for stay in search.stays.values()) < search.count:
            _end(search)
        return []
    count, newcomer = search.count, search.newcomer
    stays = search.stays[newcomer].left is None
    _end(search)
    if verdict:
        state.max_packing = count
        return []
    if hopeless:
        search.ratios.pop(count, None)
        search.strangers.pop(count, None)
        search.hopeless += 1
    search.over = not hopeless or search.hopeless == LAST_HOPELESS
    if not stays or state.trials[newcomer].status != "running":
        return []
    # The newcomer if it can be moved, else one of those that it joined.
    for name in (newcomer, *(name for name in here if name != newcomer)):
        trial = state.trials[name]
        if trial.kind != "plain" and trial.steady:
            state.suspend(trial, now)
            return [Suspend(name)]
    return []


def _end(search: Search) -> None:
    if not (search.ratios.get(search.count) or search.strangers.get(search.count)):
        search.spoilt += 1
        search.over = search.spoilt >= TRIES
    search.count = 0
    search.stays.clear()
    search.pending.clear()


def _weigh(search: Search) -> None:
    """Iterations of whose company all is known by now are taken as figures, or dropped."""
    left = []
    for sample in search.pending:
        name, end, seconds, alone, own = sample
        company: int | None = 1
        begin = end - seconds
        for other, stay in search.stays.items():
            if other == name or company is None:
                continue
            if stay.began is None and stay.left is None:
                left.append(sample)  # it may have been loading, or training already
                company = None
                continue
            since = stay.began if stay.began is not None else end
            until = stay.left if stay.left is not None else end
            shared = min(until, end) - max(since, begin)
            if shared >= (1 - MIXED) * seconds:
                company += 1
            elif shared > MIXED * seconds:
                company = None
        if company == search.count:
            (search.ratios if own else search.strangers).setdefault(search.count, []).append(seconds / alone)
    search.pending = left


def _hopeless(search: Search) -> bool:
    p = search.count
    own, strange = search.ratios.get(p, []), search.strangers.get(p, [])
    return max(own, default=0) > HOPELESS * p or max(strange, default=0) > 2 * HOPELESS * p


def _verdict(search: Search) -> bool | None:
    p = search.count
    own, strange = search.ratios.get(p, []), search.strangers.get(p, [])
    found = own if len(own) >= YES else own + strange
    if len(found) < YES:
        return None
    below = search.ratios.get(p - 1) or search.strangers.get(p - 1) or [1.0]
    # Eq. 3.1 for the last step alone: those before it were found to pay.
    if 1 - (p - 1) / p * median(found) / median(below) > THRESHOLD:
        return True
    return False if len(own) >= NO or len(own) + len(strange) >= NO_OF_STRANGERS else None


def _next(state: State) -> Trial | None:
    """The trial that would start next if there were a device, unless it asks for something special."""
    line = state.waiting.next_line([], 1 << 30)
    if line is None or line.gang > 1 or state.hold is not None or state.may_start(line.group) <= 0:
        return None
    trial = state.trials[line.entries[0][2]]
    return trial if trial.asked_share == 1 else None


def _candidate(
    state: State, newcomer: Trial, count: int, measured: bool = False, together: float | None = None
) -> int | None:
    """A device that holds fewer than ``count`` trials and has room for one more.

    For a try it must hold one fewer. ``measured``: their speeds are known. ``together``: they start at this very time.
    """
    least = count - 1 if measured or together is not None else 1
    found: dict[int, list[Trial]] = {}
    for device, tenants in state.devices.tenants.items():
        if not least <= len(tenants) < count or device in state.devices.leaving:
            continue
        trials = [state.trials[name] for name in tenants]
        if not all(map(_stays, trials)) or (measured and not all(map(_measured, trials))):
            continue
        if together is not None and not all(trial.since == together and not trial.settled for trial in trials):
            continue
        if state.sharing is None:
            return device
        found[device] = trials
    return None if state.sharing is None else state.sharing.choose(newcomer, found)


def _stays(trial: Trial) -> bool:
    return trial.steady and len(trial.held) == 1 and trial.asked_share == 1


def _measured(trial: Trial) -> bool:
    """It can be moved, will be there for long enough, and how fast such trials are alone is known."""
    return trial.kind != "plain" and _long(trial) and trial.group.pool.base() is not None


def _long(trial: Trial) -> bool:
    return trial.iterations is None or trial.iterations >= LONG


def _join(state: State, trial: Trial, device: int, count: int, now: float) -> Start:
    state.open(device, count)
    return start(state, trial, (device,), count, now)

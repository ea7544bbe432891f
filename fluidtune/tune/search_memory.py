"""What a run's algorithm knows, kept so that a restored driver knows it too.

The algorithm's state is in each snapshot of Tune, and so is as old as what Tune knows of the trials. The journal
(`search_journal`) has what the algorithm was told since then, and what it answered. A restored driver unpickles the
state and tells it the journal. A trial whose results Tune has not yet reports them again. The algorithm does not hear
them twice: they get the answers that the journal has.

Only a call whose whole effect is its answer is an entry. One that acts on trials itself (a halving, a perturbation)
ends the journal, and Tune is asked for a snapshot. A driver killed before that goes on just before that call.
"""

from __future__ import annotations

import base64
import logging
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from fluidtune.ray_compat.controller import flat_last_result, put_in_order, set_status, turn
from fluidtune.ray_compat.scheduler_pickle import perturbations, pickled, trial_gone, unpickled
from fluidtune.ray_compat.schedulers import limit_of
from fluidtune.ray_compat.trainable import TRAINING_ITERATION
from fluidtune.tune.search_journal import Entry, SearchJournal, read_entries

logger = logging.getLogger(__name__)

#: The version of what `SearchMemory.saved` returns.
VERSION = 3
#: What an algorithm calls of Tune's controller to act on a trial.
_ACTS = frozenset({"stop_trial", "pause_trial", "_set_trial_status", "_schedule_trial_save", "save"})
_STATUS_AFTER = {
    TrialScheduler.PAUSE: Trial.PAUSED,
    "add": Trial.PENDING,
    "complete": Trial.TERMINATED,
    "error": Trial.ERROR,
    "remove": Trial.TERMINATED,
}
#: A decision, and what the algorithm put into the result.
_Answer = tuple[str, dict[str, Any]]


class _Watched:
    """Tune's controller, as an algorithm is handed it. ``acted``: the algorithm has acted on a trial."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind
        self.acted = False

    def __getattr__(self, name: str) -> Any:
        if name in _ACTS:
            self.acted = True
        return getattr(self._behind, name)


class _Recalled:
    """In the place of Tune's controller while the journal is told. An algorithm that acts now decides anew."""

    def __init__(self, behind: Any, trials: Sequence[Trial]) -> None:
        self._behind, self._trials = behind, trials

    def get_trials(self) -> list[Trial]:
        return list(self._trials)

    def get_live_trials(self) -> set[Trial]:
        return {trial for trial in self._trials if not trial.is_finished()}

    def __getattr__(self, name: str) -> Any:
        if name in _ACTS:
            raise _OtherwiseError(f"the algorithm calls {name}, which it had not done before")
        return getattr(self._behind, name)


class _OtherwiseError(Exception):
    """The journal cannot be told any further."""


class SearchMemory:
    """Stands between a run's calls of its algorithm ``base`` and the algorithm.

    One thing: a call of the algorithm, what is kept of it, and what a restored run makes of that.
    """

    def __init__(self, base: TrialScheduler) -> None:
        self._base: Any = base
        self._journal: SearchJournal | None = None
        self._ask_for_snapshot: Callable[[], None] = lambda: None
        #: How deep calls of the algorithm are nested: it stops a trial, and hears of that.
        self._depth = 0
        self._told_why_not = False
        self._settings: dict[str, Any] = {}
        #: By trial, the number of the newest result that the algorithm heard, and its answer.
        self._heard: dict[str, tuple[Any, _Answer]] = {}
        #: Trials that have ended for the algorithm, each with the number of its last result, if that came then.
        self._ended: dict[str, Any] = {}
        #: By trial that has not ended, its turn: lowest for the one that was added, or last paused, before all others.
        self._turns: dict[str, int] = {}
        #: By trial that may report results again, the answers that are known, by the results' numbers.
        self._known: dict[str, dict[Any, _Answer]] = {}
        #: What an earlier driver has kept, until `resume`; its journal; and the trials that Tune has meanwhile.
        self._saved: dict[str, Any] | None = None
        self._entries: list[Entry] = []
        self._turn = 0
        self._folder: Path | None = None
        self._came: list[Trial] = []
        #: Trials that were paused, and report again what led to it; and those that wait meanwhile.
        self._awaited: list[Trial] = []
        self._held: list[Trial] = []
        #: Trials that ended for an earlier driver, and train on.
        self._reopened: set[str] = set()

    # --- the run begins

    def recall(self, saved: dict[str, Any], at: int) -> None:
        """Tune adds its first trial. ``saved``: what an earlier driver has kept; ``at``: the turn of Tune's loop."""
        self._saved, self._turn, self._settings = saved, at, _settings(self._base)

    def start(self, folder: Path | None, ask_for_snapshot: Callable[[], None]) -> None:
        """FluidTune runs the job. ``folder``: where the journal is; None: the storage is not here."""
        self._ask_for_snapshot, self._folder = ask_for_snapshot, folder
        self._settings = self._settings or _settings(self._base)
        if self._saved is not None:
            self._entries = [] if folder is None else read_entries(folder, self._saved.get("position", 0))
            return
        self._pickled()  # one that cannot be pickled says so now
        self._begin_journal(0, cut=True)

    def _begin_journal(self, position: int, cut: bool = False) -> None:
        if self._folder is not None:
            self._journal = SearchJournal(self._folder, position, cut)

    def reopen(self, trial: Trial) -> None:
        """The trial, which Tune adds next, has ended and trains on: the algorithm hears of it as of a new one."""
        self._reopened.add(trial.trial_id)

    # --- what Tune tells the algorithm

    def add(self, controller: Any, trial: Trial) -> None:
        name = trial.trial_id
        if self._saved is not None:  # the algorithm is asked when all trials are there
            self._came.append(trial)
        elif name not in self._ended or name not in self._known:  # else it was ended, and reports again up to that
            with self.asking(controller) as handed:
                self._base.on_trial_add(handed, trial)
            self._note(Entry("add", name))
            self._ask_for_snapshot()  # Tune must know the trial when it reports

    def result(self, controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """The algorithm's decision, or the one that it made when it heard the result before."""
        name, number = trial.trial_id, result.get(TRAINING_ITERATION)
        known = self._answer(name, number)
        if known is None:
            before = set(result)
            with self.asking(controller) as handed:
                decision = self._base.on_trial_result(handed, trial, result)
            known = decision, {key: result[key] for key in result.keys() - before}
            self._note(Entry("result", name, result, *known))
        result.update(known[1])
        return known[0]

    def end(self, kind: str, controller: Any, trial: Trial, result: dict[str, Any] | None = None) -> None:
        """The trial has ended for the algorithm. ``kind``, ``result``: as in `Entry`."""
        if self._saved is not None or trial.trial_id in self._ended:
            return
        entry = Entry(kind, trial.trial_id, result)
        with self.asking(controller) as handed:
            _tell(self._base, handed, trial, entry)
        self._note(entry)

    def turn_of(self, trial: Trial) -> int:
        """The trial's turn among those that wait, lowest first: a restored run has the same."""
        return self._turns.get(trial.trial_id, 0)

    def _goes_last(self, name: str) -> None:
        turn = next(reversed(self._turns.values()), 0) + 1
        self._turns.pop(name, None)
        self._turns[name] = turn

    def _answer(self, name: str, number: Any) -> _Answer | None:
        """What is known of the trial's result with this number."""
        known = self._known.get(name)
        if known is not None and name in self._heard:
            last = self._heard[name][0]
            if number in known:
                if number == last and name not in self._ended:
                    del self._known[name]
                return known[number]
            if _below(number, last):
                return TrialScheduler.CONTINUE, {}
            if name not in self._ended:
                del self._known[name]
        return (TrialScheduler.STOP, {}) if name in self._ended else None

    @contextmanager
    def asking(self, controller: Any) -> Iterator[Any]:
        """For a call of the algorithm, which gets what is returned in the place of Tune's ``controller``."""
        watched, perturbed = _Watched(controller), perturbations(self._base)
        self._depth += 1
        try:
            yield watched
        finally:
            self._depth -= 1
            if perturbations(self._base) != perturbed:
                self._heard.clear()  # a trial that has another one's state counts anew
            if watched.acted:
                if self._journal is not None:
                    self._journal.end()
                self._ask_for_snapshot()

    def _note(self, entry: Entry) -> None:
        self._keep(entry)
        if self._journal is not None and not self._depth:
            self._journal.append(entry)

    def _keep(self, entry: Entry) -> None:
        """The algorithm has heard this, from this driver or from an earlier one."""
        name, number, answer = entry.trial, *_answered(entry)
        if entry.kind == "add":
            self._ended.pop(name, None)
            self._known.pop(name, None)
        elif entry.kind != "result":
            self._ended[name] = number
            self._turns.pop(name, None)
        elif answer[0] == TrialScheduler.NOOP:
            self._heard.pop(name, None)  # it was acted on, and goes on as another one
        else:
            self._heard[name] = number, answer
        if entry.kind == "add" or answer[0] != TrialScheduler.CONTINUE:
            self._goes_last(name)

    # --- snapshots

    def saved(self, controller: Any) -> dict[str, Any] | None:
        """What Tune's snapshot is to keep: plain values, as JSON has them. ``controller``: Tune's own."""
        if self._saved is not None:
            return {**self._saved, "turn": turn(controller)}
        statuses = {trial.trial_id: trial.status for trial in controller.get_trials()}
        statuses.update((trial.trial_id, Trial.PENDING) for trial in self._held)
        statuses.update((trial.trial_id, Trial.PAUSED) for trial in self._awaited)
        content = self._pickled(statuses)
        if content is None:
            return None
        kept = base64.b64encode(zlib.compress(content, 1)).decode()
        position = 0 if self._journal is None else self._journal.position
        return {
            "version": VERSION,
            "ray": ray.__version__,
            "turn": turn(controller),
            "position": position,
            "class": _class_of(self._base),
            "settings": self._settings,
            "limit": limit_of(self._base)[1],
            "state": kept,
        }

    def _pickled(self, statuses: dict[str, str] | None = None) -> bytes | None:
        streams = random.getstate(), np.random.get_state()
        try:
            return pickled(self._base, (statuses, self._heard, self._ended, self._known, self._turns, streams))
        except Exception as error:  # an attribute may raise anything
            if not self._told_why_not:
                self._told_why_not = True
                what = f"{type(self._base).__name__} cannot be pickled ({type(error).__name__}: {error})"
                logger.warning("FluidTune: %s, so that a restored run begins it anew, as under stock Ray Tune", what)
            return None

    def state_written(self) -> Callable[[bool], None]:
        """Tune has written its state, with `saved`. See `whole_files.OnState`."""
        return (lambda done: None) if self._journal is None else self._journal.begin()

    # --- a restored run

    def ready(self, controller: Any) -> bool:
        """Tune asks for a trial to run. Returns whether the algorithm may be asked.

        ``controller``: as a scheduler is handed it.
        """
        if self._saved is not None:
            self._resume(controller, self._saved)
        if self._awaited:
            self._awaited = [trial for trial in self._awaited if trial.status in (Trial.PENDING, Trial.RUNNING)]
        if self._held and not self._awaited:
            for trial in self._held:
                if trial.status == Trial.PAUSED:
                    set_status(controller, trial, Trial.PENDING)
            self._held = []
        return not self._awaited

    def _resume(self, controller: Any, saved: dict[str, Any]) -> None:
        came, self._came = self._came, []
        try:
            if why := self._unlike(saved, came):
                raise _OtherwiseError(why)
            statuses, told = self._recalled(controller, saved, came)
        except Exception as error:  # bytes of another version may raise anything
            why = str(error) if isinstance(error, _OtherwiseError) else f"{type(error).__name__}: {error}"
            logger.warning("FluidTune: the algorithm begins without earlier results, as under stock Ray Tune: %s", why)
            statuses, told = {}, 0
            self._heard, self._ended, self._known, self._turns = {}, {}, {}, {}
        self._saved, self._entries = None, []
        self._begin_journal(saved.get("position", 0) + told if statuses else 0, cut=not statuses)
        if self._journal is not None:
            self._journal.end()  # until Tune has the trials as they are now
        put_in_order(controller, list(statuses))
        self._go_on(controller, came, statuses)
        self._ask_for_snapshot()

    def _unlike(self, saved: dict[str, Any], came: Sequence[Trial]) -> str | None:
        """Why the saved state is not this algorithm's; None: it is."""
        if why := unreadable(saved):
            return why
        if saved["turn"] != self._turn:
            return "another driver, which kept none, has gone on with the run"
        if saved["class"] != _class_of(self._base):
            return f"they are those of {saved['class']}, and the script has {_class_of(self._base)}, which holds"
        now, then = self._settings, saved["settings"]
        other = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
        if other:
            key = other[0]
            return f"the script has {key}={now.get(key)!r}, which holds, and the run was begun with {then.get(key)!r}"
        return None

    def _recalled(self, controller: Any, saved: dict[str, Any], came: Sequence[Trial]) -> tuple[dict[str, str], int]:
        """Bring the algorithm to where it was. Returns each trial's status there, and how many entries were told."""
        trials = {trial.trial_id: trial for trial in came}
        fresh, now = dict(vars(self._base)), {trial: trial.status for trial in came}
        content = zlib.decompress(base64.b64decode(saved["state"], validate=True))
        gone: dict[str, Trial] = {}

        def trial_called(name: str) -> Trial:
            return trials.get(name) or gone.setdefault(name, trial_gone(name))

        entries = self._entries
        try:
            while True:
                attributes, more = unpickled(content, self._base, trial_called)
                statuses, self._heard, self._ended, self._known, self._turns, (state, numpy_state) = more
                vars(self._base).clear()
                vars(self._base).update(attributes)
                random.setstate(state)
                np.random.set_state(numpy_state)
                told = self._tell_all(controller, entries, trials, statuses)
                if told == len(entries):
                    return statuses, told
                entries = entries[:told]
        except BaseException:
            vars(self._base).clear()
            vars(self._base).update(fresh)
            raise
        finally:
            for trial, status in now.items():
                trial.status = status

    def _tell_all(
        self, controller: Any, entries: Sequence[Entry], trials: dict[str, Trial], statuses: dict[str, str]
    ) -> int:
        """Tell the algorithm the entries. Returns how many could be told."""
        for name, trial in trials.items():
            trial.status = statuses.get(name, Trial.PENDING)
        known = [trial for name, trial in trials.items() if name in statuses]
        recalled = _Recalled(controller, known)
        for place, entry in enumerate(entries):
            trial = trials.get(entry.trial)
            if trial is None or entry.trial not in statuses:
                continue  # Tune has never saved it, and so has no such trial: its searcher suggests it again
            if entry.kind == "result":
                trial.status = Trial.RUNNING
            try:
                _tell(self._base, recalled, trial, entry)
            except Exception as error:
                logger.debug("FluidTune: entry %d of the journal was not told: %s", place, error)
                return place
            after = _STATUS_AFTER.get(entry.decision or entry.kind, Trial.RUNNING)
            trial.status = statuses[entry.trial] = after
            self._keep(entry)
            if entry.kind == "result":
                answers = self._known.setdefault(entry.trial, {})
                # It was paused, and went on.
                answers.update({before: (TrialScheduler.CONTINUE, added) for before, (_, added) in answers.items()})
                answers.update([_answered(entry)])
        return len(entries)

    def _go_on(self, controller: Any, came: Sequence[Trial], statuses: dict[str, str]) -> None:
        """Have each trial be what the algorithm takes it for: those that it ended end, those that it paused wait."""
        ended: list[Trial] = []
        paused: list[Trial] = []
        others: list[Trial] = []
        for trial in came:
            name = trial.trial_id
            before = statuses.get(name)
            if before is None or name in self._reopened or (before == Trial.ERROR and not trial.is_finished()):
                self._known.pop(name, None)
                self._ended.pop(name, None)
                self.add(controller, trial)
            elif not trial.is_finished():
                number, (decision, added) = self._heard.get(name, (None, (TrialScheduler.CONTINUE, {})))
                self._known.setdefault(name, {})[number] = decision, added
                done = trial.run_metadata.last_result.get(TRAINING_ITERATION) or 0
                behind = _below(done, number) or _below(done, self._ended.get(name))
                if not behind and (decision == TrialScheduler.STOP or name in self._ended):
                    ended.append(trial)
                elif before == Trial.PAUSED:
                    (self._awaited if behind else paused).append(trial)
                else:
                    others.append(trial)
        if self._awaited:  # meanwhile none may come to where the algorithm looks at the paused ones
            self._held = others
            paused = paused + others
        for trial in paused:
            set_status(controller, trial, Trial.PAUSED)
        for trial in ended:
            self.end("complete", controller, trial, flat_last_result(trial))
            controller.stop_trial(trial)

    def run_ended(self, saved: bool) -> None:
        """Tune's run is over. ``saved``: its last snapshot has all of it."""
        if self._journal is not None:
            self._journal.remove() if saved else self._journal.end()


def unreadable(saved: dict[str, Any]) -> str | None:
    """Why this version cannot read what `SearchMemory.saved` returned; None: it can."""
    if saved.get("version") != VERSION:
        return f"they were kept in format {saved.get('version')!r}, and this version of FluidTune reads {VERSION}"
    if saved["ray"] != ray.__version__:
        return f"they were kept under Ray {saved['ray']}, and this is {ray.__version__}"
    return None


def _tell(base: Any, controller: Any, trial: Trial, entry: Entry) -> None:
    result = [dict(entry.result or {})] if entry.kind in ("result", "complete") else []
    getattr(base, f"on_trial_{entry.kind}")(controller, trial, *result)


def _answered(entry: Entry) -> tuple[Any, _Answer]:
    return (entry.result or {}).get(TRAINING_ITERATION), (entry.decision or TrialScheduler.CONTINUE, entry.added or {})


def _below(number: Any, other: Any) -> bool:
    numbers = isinstance(number, (int, float)) and isinstance(other, (int, float))
    return numbers and bool(number < other)


def _class_of(scheduler: Any) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def _settings(scheduler: Any) -> dict[str, Any]:
    """The plain attributes of an algorithm that has heard nothing."""
    plain = (int, float, str, bool)
    return {key: value for key, value in vars(scheduler).items() if type(value) in plain}

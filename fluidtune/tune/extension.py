"""What a run that has ended goes on with: further samples, trials that train on, another search space.

`extension_of` checks what is asked for before a process is started. The run's `FluidScheduler` carries it out while
Tune restores the run. A trial trains on to a larger limit of an attribute where all of this holds:

| what | otherwise |
| --- | --- |
| it has ended without an error | `Tuner.restore` says what becomes of it |
| its last result has come to its limit of before, by its stop criterion or ASHA | it was stopped, or ended by itself |
| its last result is below the new limit | there is nothing to train |
| it has a checkpoint | it would begin anew |
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune import TuneConfig
from ray.tune.experiment import Trial
from ray.tune.search import BasicVariantGenerator, Searcher, create_searcher
from ray.tune.search.sample import Domain

from fluidtune.error_lines import failure
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import schedulers, searches
from fluidtune.ray_compat.controller import controller_behind, save_state
from fluidtune.ray_compat.run_state import search_of, trials_of
from fluidtune.report.metric_values import value_of
from fluidtune.tune.search_memory import unreadable

logger = logging.getLogger(__name__)


@dataclass
class Extension:
    """``known``: the run's trials; ``trains_on``: of these. ``samples``: further ones. ``until``: the new limits.

    ``space``: of the further samples; None: that of before. ``searcher``: in place of the run's; None: the run's own.
    """

    known: frozenset[str]
    trains_on: frozenset[str]
    samples: int
    until: Mapping[str, float]
    space: Mapping[str, Any] | None
    searcher: Searcher | None

    def begin(self, search: Any, first: Trial) -> None:
        """Tune has restored the search algorithm, and adds the run's ``first`` trial.

        Raises:
            FluidTuneError: Tune has begun the run anew, or its search algorithm has kept nothing.
        """
        if first.trial_id not in self.known:
            raise FluidTuneError("Ray Tune could not restore the run, as its log says, so it is not continued")
        try:
            searches.go_on(search, self.samples, self.until, self.space)
        except (IndexError, AttributeError):
            raise FluidTuneError(f"{type(search).__name__} kept nothing to go on from; begin a new run") from None
        if self.searcher is not None:
            searches.replace_searcher(search, self.searcher)

    def reopen(self, trial: Trial) -> bool:
        """Tune adds the trial. Returns whether it has ended and trains on."""
        again = trial.trial_id in self.trains_on
        if again:
            trial.set_status(Trial.PENDING)
        if not trial.is_finished():
            trial.stopping_criterion = {**(trial.stopping_criterion or {}), **self.until}
        return again

    def keep(self, tune_controller: Any) -> None:
        """Have the run's storage keep it, and only then say so: each later driver of the run goes on with it.

        Raises:
            FluidTuneError: the storage does not keep it.
        """
        try:
            save_state(controller_behind(tune_controller))
        except Exception as error:  # Ray raises what its storage raises
            raise FluidTuneError(f"the run's storage does not keep what is asked for ({failure(error)}); ask again")
        said = "FluidTune: the run goes on; further samples: %d, trials that train on: %d of %d"
        logger.warning(said, self.samples, len(self.trains_on), len(self.known))


def come_to_limit(last: Mapping[str, Any], limits: Mapping[str, float], until: Mapping[str, float]) -> bool:
    """Whether a trial with this last result has come to one of its ``limits`` of before, and to no new one."""
    now = {name: value for name in until if (value := value_of(last, name)) is not None}
    return any(value >= limits[name] for name, value in now.items() if name in limits) and all(
        value < until[name] for name, value in now.items()
    )


def lies_within(config: Any, space: Any) -> bool:
    """Whether a trial's configuration is one that the search space has. Objects count as equal."""
    if isinstance(space, Domain):
        try:
            return bool(space.is_valid(config))
        except TypeError:
            return False
    if not isinstance(space, Mapping):
        return not isinstance(space, (int, float, str, bool)) or bool(config == space)
    if space.keys() == {"grid_search"}:
        return any(lies_within(config, each) for each in space["grid_search"])
    alike = isinstance(config, Mapping) and config.keys() == space.keys()
    return alike and all(lies_within(config[name], space[name]) for name in space)


def extension_of(
    where: str,
    files: Any,
    config: TuneConfig,
    samples: int | None,
    until: Mapping[str, float],
    space: Mapping[str, Any] | None,
) -> Extension:
    """What the run in this directory goes on with. ``config``: the run's. The others: see `Extension`.

    Raises:
        FluidTuneError: the run cannot go on with that.
    """
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise FluidTuneError(f"num_samples={samples!r} is the number of further samples; give a whole number above 0")
    trials, saved, own = trials_in(where, files), search_of(where, files), config.search_alg
    if samples is None and (space is not None or not (until or any(not trial.is_finished() for trial in trials))):
        raise FluidTuneError("say how the run goes on: num_samples (--samples), until (--until), or both")
    if saved is None:
        logger.warning("FluidTune: the run's scheduler kept no results, and begins without, as under stock Ray Tune")
    elif why := unreadable(saved):
        raise FluidTuneError(f"{where} cannot go on with earlier results: {why}; use those, or begin a new run")
    trained = _trained_on(trials, config.scheduler.base_scheduler, saved, until) if until else frozenset()
    if until and not trained and not samples:
        raise FluidTuneError(f"until={dict(until)}: no trial that came to its limit has a checkpoint to train on from")
    own = create_searcher(own) if isinstance(own, str) else own
    if not isinstance(own, (BasicVariantGenerator, Searcher, type(None))):
        raise FluidTuneError(f"search_alg={type(own).__name__} cannot go on: it is no Searcher; begin a new run")
    searcher = None
    if space is not None:
        if searches.has_objects(space):
            raise FluidTuneError("param_space: it has objects, which Ray numbers as those of the run; begin a new run")
        within = [trial for trial in trials if lies_within(trial.config, space)]
        said = f"{len(within)} of {len(trials)} trials lie within the new space; the scheduler compares with all"
        if isinstance(own, Searcher):
            searcher, told = _searcher_for(own, config, space, within)
            said += f"; {type(searcher).__name__} knows {told}"
        logger.warning("FluidTune: %s", said)
    return Extension(frozenset(trial.trial_id for trial in trials), trained, samples or 0, until, space, searcher)


def trials_in(where: str, files: Any) -> list[Trial]:
    """The trials of the run in this directory.

    Raises:
        FluidTuneError: there is no run with trials.
    """
    try:
        trials = trials_of(where, files)
    except Exception as error:  # Ray raises what its storage raises
        raise FluidTuneError(f"{where} is no run's directory ({failure(error)}); give the one that holds tuner.pkl")
    if not trials:
        raise FluidTuneError(f"the run in {where} has no trial yet; run its script")
    return trials


def _trained_on(
    trials: Sequence[Trial], base: Any, saved: Mapping[str, Any] | None, until: Mapping[str, float]
) -> frozenset[str]:
    """The trials that train on."""
    counted, limit = schedulers.limit_of(base)
    if limit is None and counted in until:
        raise FluidTuneError(f"until {counted}: {type(base).__name__} has rungs for its max_t alone; begin a new run")
    limits = {trial.trial_id: dict(trial.stopping_criterion or {}) for trial in trials}
    if counted is not None and limit is not None:
        limit = (saved or {}).get("limit", limit)
        for each in limits.values():
            each[counted] = min(each.get(counted, limit), limit)
    for name, value in until.items():
        before = max((each[name] for each in limits.values() if name in each), default=None)
        if before is None:
            raise FluidTuneError(f"until {name}={value!r}: no trial has a limit of {name!r}; each ends by itself")
        if not isinstance(value, (int, float)) or not before < value < float("inf"):
            raise FluidTuneError(
                f"until {name}={value!r} is no number above the limit of before, {before:g}; give more, or nothing "
                "where that was interrupted"
            )
    ended = [trial for trial in trials if trial.status == Trial.TERMINATED]
    came = [trial for trial in ended if come_to_limit(trial.last_result, limits[trial.trial_id], until)]
    kept = frozenset(trial.trial_id for trial in came if trial.checkpoint is not None)
    if lost := len(came) - len(kept):
        logger.warning("FluidTune: %d of %d trials came to their limit and have no checkpoint", lost, len(trials))
    return kept


def _searcher_for(
    own: Searcher, config: TuneConfig, space: Mapping[str, Any], trials: Sequence[Trial]
) -> tuple[Searcher, str]:
    """A searcher of the same kind for another space, and how many of these trials it knows, in words."""
    searcher, told, why = copy.deepcopy(own), 0, ""
    while hasattr(searcher, "searcher"):
        searcher = searcher.searcher
    if not searcher.set_search_properties(config.metric, config.mode, dict(space)):
        raise FluidTuneError(f"param_space: {type(searcher).__name__} was given its own space; leave param_space out")
    for trial in trials:
        value = value_of(trial.last_result, searcher.metric)
        if trial.status == Trial.TERMINATED and value is not None:
            try:
                searcher.add_evaluated_point(dict(trial.evaluated_params), value)
                told += 1
            except Exception as error:  # each searcher raises its own; NotImplementedError: it can be told nothing
                why = f" ({failure(error)})"
    return searcher, f"{told} of these{why}"

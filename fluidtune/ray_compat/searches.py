"""A search algorithm of Tune that has ended, or is to end, goes on with further samples."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ray.tune.experiment import Experiment
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
from ray.tune.search import BasicVariantGenerator


def has_objects(space: Mapping[str, Any]) -> bool:
    """Whether a search space has objects for which Tune puts something else, numbered within this space alone."""
    resolvers = create_resolvers_map()
    inject_placeholders(copy.deepcopy(dict(space)), resolvers)
    return bool(resolvers)


def go_on(search: Any, samples: int, stop: Mapping[str, float], space: Mapping[str, Any] | None) -> None:
    """Have the algorithm make ``samples`` more than it was to make. ``stop``: further criteria of all that it makes.

    ``space``: another one, without objects (`has_objects`). Of a search without limit (``num_samples=-1``) these
    samples are all that follow. Raises IndexError or AttributeError if the algorithm has nothing to go on from.
    """
    plain = isinstance(search, BasicVariantGenerator)
    specs = [each.unresolved_spec for each in search._iterators] if plain else [search._experiment.spec]
    for spec in specs:
        spec["stop"] = {**(spec.get("stop") or {}), **stop}
    spec = {**specs[-1], "num_samples": samples, **({} if space is None else {"config": dict(space)})}
    if plain and samples:
        for iterator in search._iterators:
            if iterator.num_samples >= sys.maxsize:
                search._total_samples, iterator.num_samples_left = iterator.counter, 0
        further = Experiment.__new__(Experiment)  # a new one would register the trainable and make a folder
        further.spec = spec
        search._points_to_evaluate, search._trial_iter, search._finished = [], None, False
        search.add_configurations(further)
    elif samples:
        had = search._counter if search._total_samples >= sys.maxsize else search._total_samples
        search._experiment.spec, search._total_samples, search._finished = spec, had + samples, False


def replace_searcher(search: Any, searcher: Any) -> None:
    """Have the run ask this searcher in place of its own."""
    while hasattr(search.searcher, "searcher"):
        search = search.searcher
    search.searcher = searcher


def before_next_trial(search: Any, call: Callable[[], object]) -> None:
    """Have ``call`` called once, before Tune asks the algorithm for a trial the next time."""
    ours = type(search)

    def next_trial(self: Any) -> Any:
        self.__class__ = ours
        call()
        return self.next_trial()

    search.__class__ = type(ours.__name__, (ours,), {"next_trial": next_trial})

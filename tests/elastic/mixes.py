"""Which mixes of the `kinds_of_loops` are trained through which widths. Runs no loop.

`cover` is the suite's part: each kind goes through each history of widths, in a mix whose other parts do not end that
trial's growth. `drawn` is the longer search: Hypothesis draws for each kind and history.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .kinds_of_loops import DATA, EXTRAS, MODELS, OPTIMIZERS, OUTSIDE, SCHEDULES, STEPS, Mix

#: The widths of the turns after the first one, in which every trial is alone: 1, 2, 3, 1-2-1 and 2-1-3.
HISTORIES = {"1": (1, 1, 1), "2": (2, 2, 2), "3": (3, 3, 3), "1-2-1": (2, 1, 1), "2-1-3": (2, 1, 3)}
AXES = {
    "model": list(MODELS),
    "optimizer": list(OPTIMIZERS),
    "schedule": list(SCHEDULES),
    "data": list(DATA),
    "step": list(STEPS),
    "extra": list(EXTRAS),
}
KINDS = [(axis, kind) for axis, kinds in AXES.items() for kind in kinds]

#: A batch may be fetched before the last one is used, or several are at hand: refused where they are divided unlike.
AHEAD = ("prefetching", "summed", "in step", "in a cycle")
#: Models with batch normalisation.
NORMED = {"batch norm", "image", "frozen"}
#: All batches have 8 samples, as those of the loop's other loader: any number of workers divides them alike.
ALIKE = "drop last"
#: Why a trial of more than one worker may be refused or sent back to one worker: words of the line that says it.
#: A loop of another kind must reach each width that is asked for.
_REFUSED = {
    **{step: "off by|steps other parameters" for step, loop in STEPS.items() if loop in OUTSIDE},
    **dict.fromkeys(AHEAD, "do not share alike|was left out"),
    **dict.fromkeys(
        ("short batches left out", "short batches end the turn"), "was left out|different things at once|stands at"
    ),
    "nested epochs": r"inside elastic\.epochs\(\)",
    "kept iterator": "keeps an iterator|was kept while the trial was resized",
    "group added": r"param groups of \[.*\] tensors before",
    "warm-up by its own count": "(a new worker does not compute|drift apart).*learning rate",
}
#: As `_REFUSED`, for what goes wrong only together.
_TOGETHER: list[tuple[str, str, str, set[str], str]] = [
    ("step", "penalty", "model", NORMED, "a gradient of a gradient goes through batch normalisation"),
    # The batches of the turn were used, but not for statistics, when those are made anew for the mean of the weights.
    ("step", "frozen statistics", "extra", {"swa"}, "do not share alike"),
]
#: What workers may differ in until it is put right, and said: only what a loop keeps to itself.
_DIFFERENCES = {"warm-up by its own count": "learning rate"}
#: Mixed with a given kind, these say nothing: a part of one does what the other needs undone.
_APART = [
    ({"step": {"scaled", "accumulate", "accumulate over turns", "by gradient", "summed"}}, {"schedule": {"by step"}}),
    ({"step": {"short batches end the turn"}}, {"data": {"batch sampler", "buckets"}}),  # they have no batch size
    (  # their last batch is one sample, which has no variance
        {"data": {"one by one", "batch sampler", "sampler with generator"}},
        {"model": NORMED},
    ),
    ({"step": {"short batches left out"}}, {"data": {"one by one"}}),  # all of its batches are short
    # Both parts of each of its batches happen to have as many positives: the check before the growth finds nothing.
    ({"step": {"class weights", "ignored samples"}}, {"data": {"processes of a turn", "split"}}),
    ({"step": {"two passes"}}, {"model": {"attention"}}),  # the sign of what is 0 but for rounding
    ({"step": {"nested epochs"}}, {"model": {"attention"}}),  # its losses grow without bound
    ({"optimizer": {"nesterov"}}, {"model": {"attention"}}),  # as well
    ({"step": {"penalty"}}, {"model": {"attention"}}),  # torch has no second derivative of it
    ({"step": {"two passes", "recomputed"}}, {"model": {"spectral"}}),  # torch refuses: it changes in each forward
    ({"extra": {"saves its model"}}, {"model": {"parametrised", "spectral"}}),  # torch pickles no such model
    (
        {"extra": {"group added"}},
        {"schedule": set(SCHEDULES) - {"none", "lr by hand"}},
    ),  # they want all groups at first
]


def sensible(mix: Mix) -> bool:
    return not any(all(getattr(mix, axis) in kinds for part in pair for axis, kinds in part.items()) for pair in _APART)


def may_be_refused(mix: Mix, widths: tuple[int, ...]) -> str:
    """A pattern of the lines that may say why this trial does not reach a width; "": it must."""
    if max(widths) == 1:
        return ""
    for axis, kind, other, kinds, why in _TOGETHER:
        if getattr(mix, axis) == kind and getattr(mix, other) in kinds:
            return why
    divided_alike = mix.step in AHEAD and mix.data == ALIKE
    reasons = [_REFUSED.get(mix.extra), None if divided_alike else _REFUSED.get(mix.step)]
    return "|".join(reason for reason in reasons if reason is not None)


def may_differ(mix: Mix) -> str:
    """A pattern of what the workers of this trial may differ in for a turn; "": nothing."""
    return _DIFFERENCES.get(mix.extra, "")


def seen(mix: Mix, widths: tuple[int, ...]) -> list[tuple[str, str]]:
    """The kinds of which this trial shows something at these widths: if one of them ends its growth, only that one."""
    if not may_be_refused(mix, widths):
        return list(vars(mix).items())
    ending = [(axis, kind) for axis, kind in vars(mix).items() if kind in _REFUSED]
    return ending if len(ending) == 1 and may_be_refused(mix, widths) == _REFUSED[ending[0][1]] else []


def stop_of(mix: Mix, widths: tuple[int, ...]) -> int:
    """``config["stop"]`` for this trial: it has a turn alone and one at each of the widths, also if it stops early."""
    return len(widths) + 1 + (mix.extra == "stops early")


def cover() -> Iterator[tuple[str, Mix]]:
    """(name of a history, mix), the same in each run: each kind is `seen` at each history."""
    met: set[tuple[str, str, str, str]] = set()
    for name, widths in HISTORIES.items():
        rng = random.Random(name)
        todo = set(KINDS)
        if max(widths) > 1:  # once with batches that are divided alike, and once with others, which may be refused
            grows = {"extra": [kind for kind in EXTRAS if kind not in _REFUSED]}
            for step in AHEAD:
                yield name, _mixed(rng, grows, {"data": ALIKE, "step": step})
                yield name, _mixed(rng, {"data": [kind for kind in DATA if kind != ALIKE]}, {"step": step})
            todo -= {("step", step) for step in AHEAD}
        while todo:
            first = rng.choice(sorted(todo))
            tries = [_tried(rng, todo, first) for _ in range(60)]
            best = max(tries, key=lambda mix: (len(todo.intersection(seen(mix, widths))), len(_pairs(mix) - met)))
            todo -= set(seen(best, widths))
            met |= _pairs(best)
            yield name, best


def _pairs(mix: Mix) -> set[tuple[str, str, str, str]]:
    return {(a, x, b, y) for (a, x), (b, y) in combinations(vars(mix).items(), 2)}


def _tried(rng: random.Random, todo: set[tuple[str, str]], first: tuple[str, str]) -> Mix:
    """A mix with ``first`` and, of most axes, something that is still to be done."""
    given = {axis: [kind for kind in kinds if (axis, kind) in todo] for axis, kinds in AXES.items()}
    return _mixed(rng, {axis: kinds for axis, kinds in given.items() if kinds and rng.random() < 0.8}, dict([first]))


def _mixed(rng: random.Random, wished: dict[str, list[str]], given: dict[str, str]) -> Mix:
    """A sensible mix with the kinds ``given`` and, if they go together, one of those ``wished``."""
    for attempt in range(1000):
        lists = {**AXES, **wished} if attempt < 20 else AXES
        mix = Mix(**{**{axis: rng.choice(kinds) for axis, kinds in lists.items()}, **given})
        if sensible(mix):
            return mix
    raise ValueError(f"no sensible mix has {given}")


def drawn(axis: str, kind: str, name: str) -> st.SearchStrategy[Mix]:
    """Mixes with this kind. Hypothesis begins with the first of each list: each kind and history has its own order."""
    rng = random.Random(f"{axis} {kind} {name}")
    others = {other: st.sampled_from(rng.sample(kinds, len(kinds))) for other, kinds in AXES.items() if other != axis}
    return st.builds(Mix, **others, **{axis: st.just(kind)}).filter(sensible)


def search(axis: str, kind: str, name: str, number: int, each: Callable[[Mix], None]) -> None:
    """Call ``each`` with ``number`` mixes that are `drawn`, the same ones in each run."""

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.seed(f"{axis} {kind} {name}")
    @given(drawn(axis, kind, name))
    def one(mix: Mix) -> None:
        each(mix)

    one()

"""Loops of many kinds, mixed: at all widths as alone, or refused in one line; never silently different.

A trial must reach each width that is asked for, unless a line says why that this mix may get.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fluidtune.elastic.checks.rehearsal import rehearse

from . import trials
from .driving import Refused, Trip, same, seed
from .kinds_of_loops import DATA, EXTRAS, MODELS, OPTIMIZERS, SCHEDULES, STEPS, Mix, trial

#: The widths of the turns after the first one, in which every trial is alone.
WIDTHS = (2, 1, 3)
AXES = {
    "model": list(MODELS),
    "optimizer": list(OPTIMIZERS),
    "schedule": list(SCHEDULES),
    "data": list(DATA),
    "step": list(STEPS),
    "extra": list(EXTRAS),
}
#: A batch may be fetched before the last one is used, or several are at hand: refused where they are divided unlike.
AHEAD = ("prefetching", "summed", "in step", "in a cycle")
#: All batches have 8 samples, as those of the loop's other loader: any number of workers divides them alike.
ALIKE = "drop last"
#: Why a trial of more than one worker may be refused or sent back to one worker: words of the line that says it.
#: A loop of another kind must reach each width that is asked for.
REFUSED = {
    **dict.fromkeys(AHEAD, "divide in different ways|was left out"),
    **dict.fromkeys(
        ("short batches left out", "short batches end the turn"), "was left out|different things at once|stands at"
    ),
    "group added": r"param groups of \[.*\] tensors before",
    "warm-up by its own count": "(a new worker does not compute|drift apart).*learning rate",
}
#: What workers may differ in until it is put right, and said: only what a loop keeps to itself.
DIFFERENCES = {"warm-up by its own count": "learning rate"}
#: Model, optimizer, schedule, data, step, extra. Each kind is `seen` in a mix whose other parts do not end its growth.
TABLE = """
    routed, sgd, lambda, drop last, prefetching, writes a history
    dropout, adagrad, lambda, drop last, summed, saves its model
    mlp, adagrad, by step, drop last, in step, nothing
    frozen, radam, by epoch, ragged, in step, nothing
    tied, nesterov, cosine, drop last, in a cycle, best model kept
    recurrent, two groups, plateau, ragged, in a cycle, saves its model
    batch norm, adamw, lambda, ragged, by gradient, stops early
    recurrent, adam, cosine, buckets, frozen statistics, best model kept
    image, sgd, plateau, processes, plain, writes a history
    routed, adadelta, lr by hand, ragged, alternating, nothing
    tied, two groups, by epoch, ragged, plain, saves its weights
    spectral, nesterov, by step, fewer than workers, evaluated, learns from the second turn on
    parametrised, radam, none, ragged, scaled, nothing
    attention, adagrad, by step, sampler with generator, left early, saves its model
    layer norm, rmsprop, plateau, own generator, twice, nothing
    parametrised, nadam, lambda, unseeded split, short batches left out, nothing
    dropout, nadam, by step, one by one, penalty, nothing
    mlp, rmsprop, by step, processes of a turn, closure, saves its model
    batch norm, radam, none, tensors, adversarial, group added
    spectral, sgd, by epoch, tensors, clip norm, nothing
    image, two groups, by epoch, unseeded split, clip value, learns from the second turn on
    image, nesterov, lr by hand, augmented, left early, warm-up by its own count
    layer norm, adam, none, ragged, regularised, writes a history
    layer norm, sgd, none, ragged, adversarial, stops early
    routed, radam, by step, drop last, recomputed, saves its model
    frozen, rmsprop, cosine, augmented, two passes, stops early
    routed, nadam, plateau, processes of a turn, short batches end the turn, best model kept
    channels last, fused, none, ragged, plain, nothing
    channels last, foreach, none, ragged, plain, nothing
    channels last, adam, none, ragged, plain, nothing
    recurrent, fused, none, ragged, plain, nothing
    words, foreach, none, ragged, plain, nothing
    mlp, line search, none, ragged, closure, nothing
    mlp, rate in a tensor, lr by hand, ragged, plain, nothing
    mlp, sgd, none, ragged, plain, prunes its weights
"""
MIXES = [Mix(*(kind.strip() for kind in line.split(","))) for line in TABLE.strip().splitlines()]


def may_be_refused(mix: Mix) -> str:
    """A pattern of the lines that may say why this trial does not reach a width; "": it must."""
    divided_alike = mix.step in AHEAD and mix.data == ALIKE
    reasons = [REFUSED.get(mix.extra), None if divided_alike else REFUSED.get(mix.step)]
    return "|".join(reason for reason in reasons if reason is not None)


def seen(mix: Mix) -> list[tuple[str, str]]:
    """The kinds of which this trial shows something: if one of them ends its growth, only that one."""
    if not may_be_refused(mix):
        return list(vars(mix).items())
    ending = [(axis, kind) for axis, kind in vars(mix).items() if kind in REFUSED]
    return ending if len(ending) == 1 and may_be_refused(mix) == REFUSED[ending[0][1]] else []


def test_every_kind_is_seen():
    found = {kind for mix in MIXES for kind in seen(mix)}
    assert found == {(axis, kind) for axis, kinds in AXES.items() for kind in kinds}
    for step in AHEAD:  # loops that fetch ahead grow, too
        assert any(mix.step == step and not may_be_refused(mix) for mix in MIXES)


def hosted(config: dict[str, Any], report: Any) -> dict[str, Any]:
    """The trial in a folder of this worker's own, as its host gives it one."""
    folder = Path(config["folder"], trials.here().session.worker)
    folder.mkdir(parents=True, exist_ok=True)  # it may come a second time
    return trial({**config, "folder": str(folder)}, report)


def tree(folder: Path) -> dict[str, Any]:
    """The files of a folder: text as it is, weights by name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".pt":
            loaded = torch.load(path, weights_only=False)
            found[path.name] = dict(loaded if isinstance(loaded, dict) else loaded.state_dict())
        else:
            found[path.name] = path.read_text()
    return found


def compare(pool: Any, folder: Path, mix: Mix) -> None:
    """AssertionError if the trial, taken through `WIDTHS`, is not what it is alone. `Refused` if it says why."""
    # A turn alone and one at each of the widths, also if it stops early.
    config = {"mix": mix, "stop": len(WIDTHS) + 1 + (mix.extra == "stops early")}
    for name in ("alone", "with", "rehearsed"):
        (folder / name).mkdir(parents=True)
    seed()
    reports, value = trials.plain(trial, {**config, "folder": str(folder / "alone")})
    seed()
    verdict = rehearse(lambda: trial({**config, "folder": str(folder / "rehearsed")}, lambda loss: None))
    if verdict.kind == "differs":
        raise Refused(verdict.reason)
    assert verdict.kind == "same", verdict
    trip = Trip(
        pool,
        {**config, "folder": str(folder / "with")},
        hosted,
        refused=may_be_refused(mix),
        differs=DIFFERENCES.get(mix.extra, ""),
    )
    got, values = trip.go(WIDTHS)
    same(got, reports)
    for each in values:
        same(each["model"], value["model"])
    same(values[0]["own"], value["own"])
    files, expected = tree(folder / "with" / "w0"), tree(folder / "alone")
    assert list(files) == list(expected)
    for name, content in expected.items():
        if isinstance(content, str):
            assert files[name] == content
        else:
            same(files[name], content)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(vars(mix).values()))
def test_a_loop_gives_at_every_width_what_it_gives_alone(pool, tmp_path, mix):
    try:
        compare(pool, tmp_path, mix)
    except Refused as error:  # one line that this mix may get
        assert may_be_refused(mix) and re.search(may_be_refused(mix), str(error)), error
        assert "\n" not in str(error)
    finally:
        gc.collect()  # ends the processes of the loaders that ran here

"""Which mixes of the `kinds_of_loops` are trained through which widths, and which may be refused. Runs no loop."""

from __future__ import annotations

from collections.abc import Iterator

from .kinds_of_loops import DATA, EXTRAS, MODELS, OPTIMIZERS, SCHEDULES, STEPS, Mix

#: The widths of the turns after the first one, in which every trial is alone.
HISTORIES = {"3": (3, 3, 3), "2-1-3": (2, 1, 3)}
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
    **dict.fromkeys(AHEAD, "do not share alike|was left out"),
    **dict.fromkeys(
        ("short batches left out", "short batches end the turn"), "was left out|different things at once|stands at"
    ),
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


def may_be_refused(mix: Mix, widths: tuple[int, ...]) -> str:
    """A pattern of the lines that may say why this trial does not reach a width; "": it must."""
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


#: History -> the mixes that go through it: model, optimizer, schedule, data, step, extra. Each kind is `seen` at each
#: history, in a mix whose other parts do not end that trial's growth.
_TABLE = {
    "3": """
        recurrent, two groups, cosine, drop last, prefetching, stops early
        image, adagrad, plateau, even, prefetching, stops early
        routed, radam, cosine, drop last, summed, learns from the second turn on
        mlp, radam, none, fewer than workers, summed, nothing
        parametrised, adam, by step, drop last, in step, nothing
        routed, nesterov, by epoch, replacing, in step, saves its model
        frozen, adadelta, cosine, drop last, in a cycle, swa
        batch norm, adamw, lr by hand, replacing, in a cycle, swa
        tied, adadelta, lambda, augmented, adversarial, saves its model
        recurrent, adam, plateau, sampler with generator, two passes, learns from the second turn on
        dropout, two groups, cosine, replacing, recomputed, best model kept
        mlp, adamw, by step, split, clip norm, ema
        image, rmsprop, by epoch, tensors, scaled, stops early
        layer norm, nadam, none, processes, frozen statistics, writes a history
        parametrised, radam, lr by hand, one by one, by gradient, swa
        frozen, nesterov, plateau, fewer than workers, alternating, nothing
        batch norm, adagrad, plateau, in order, first batches, saves its weights
        attention, sgd, by epoch, processes of a turn, plain, stops early
        routed, adamw, by epoch, ragged, evaluated, swa
        spectral, sgd, by epoch, buckets, closure, nothing
        mlp, nesterov, by epoch, unseeded split, twice, warm-up by its own count
        attention, two groups, by step, subset of two, left early, swa
        batch norm, sgd, cosine, own generator, twice, best model kept
        layer norm, nadam, by epoch, batch sampler, penalty, saves its model
        parametrised, adagrad, cosine, unseeded split, accumulate, ema
        dropout, nadam, by step, weighted, regularised, swa
        frozen, adam, none, even, short batches end the turn, nothing
        image, radam, by step, even, clip value, ema
        attention, nadam, cosine, drop last, several losses, saves its model
        mlp, radam, lr by hand, augmented, accumulate over turns, group added
        layer norm, radam, cosine, processes of a turn, short batches left out, saves its weights
        recurrent, two groups, plateau, one by one, accumulate over turns, writes a history
    """,
    "2-1-3": """
        routed, sgd, lambda, drop last, prefetching, writes a history
        dropout, adagrad, lambda, in order, prefetching, saves its model
        parametrised, adamw, lr by hand, drop last, summed, nothing
        routed, sgd, lr by hand, buckets, summed, saves its model
        mlp, adagrad, by step, drop last, in step, swa
        frozen, radam, by epoch, ragged, in step, warm-up by its own count
        tied, nesterov, cosine, drop last, in a cycle, best model kept
        recurrent, two groups, plateau, ragged, in a cycle, saves its model
        batch norm, adamw, lambda, ragged, by gradient, stops early
        recurrent, adam, cosine, buckets, frozen statistics, best model kept
        image, sgd, plateau, processes, plain, writes a history
        routed, adadelta, lr by hand, even, alternating, ema
        tied, two groups, by epoch, in order, several losses, saves its weights
        spectral, nesterov, by step, fewer than workers, evaluated, learns from the second turn on
        parametrised, radam, none, batch sampler, scaled, swa
        attention, adagrad, by step, sampler with generator, left early, saves its model
        layer norm, rmsprop, plateau, own generator, twice, nothing
        parametrised, nadam, lambda, split, short batches left out, swa
        dropout, nadam, by step, one by one, penalty, ema
        mlp, rmsprop, by step, processes of a turn, closure, saves its model
        frozen, adamw, cosine, subset of two, accumulate over turns, stops early
        batch norm, radam, none, tensors, adversarial, group added
        spectral, sgd, by epoch, tensors, clip norm, ema
        image, two groups, by epoch, unseeded split, clip value, learns from the second turn on
        image, nesterov, lr by hand, augmented, first batches, warm-up by its own count
        layer norm, sgd, none, weighted, adversarial, stops early
        spectral, rmsprop, cosine, replacing, regularised, writes a history
        recurrent, adam, cosine, split, first batches, stops early
        routed, radam, by step, drop last, recomputed, saves its model
        frozen, rmsprop, cosine, augmented, two passes, stops early
        routed, nadam, plateau, processes of a turn, short batches end the turn, best model kept
        spectral, two groups, none, drop last, accumulate, nothing
    """,
}


def table() -> Iterator[tuple[str, Mix]]:
    """(name of a history, mix)."""
    for name, lines in _TABLE.items():
        for line in lines.strip().splitlines():
            yield name, Mix(*(kind.strip() for kind in line.split(",")))

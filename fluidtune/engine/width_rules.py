"""Which widths a trial may have, and when another width pays: c, d and DynamicFluid's two rules (alg. 3.2).

Answers only; `placing` and `resizing` decide with them. What is said here of the packing limit c is explained in
docs/engine.md; how c is found is the matter of `packing_search`.
"""

from __future__ import annotations

from fluidtune.engine.estimates import current_width, knows_scaling, scaling_overhead, seconds_left
from fluidtune.engine.speed import scaled, widest_paying
from fluidtune.engine.state import State
from fluidtune.engine.trial import Trial
from fluidtune.planning.fluid import resize_pays

#: epsilon (alg. 3.2): the seconds that a resize costs. It stops no trial on real devices, but the first calls of a
#: new worker are computed twice: ``stall`` of `benchmarks.resize`. This is judgement, for larger modules.
EPSILON = 0.2

# Wide: the scaling limit d, and DynamicFluid's rules


def allowed_width(state: State, most: int | None = None) -> int:
    """d by the setting ``max_workers`` and the job's devices, whatever was measured; at least 1.

    ``most``: the number of devices that the job might have; None: those that are there.
    """
    devices = len(state.devices) if most is None else most
    return max(1, min(devices, state.max_workers or devices))


def widest(state: State, trial: Trial, most: int | None = None) -> int:
    """d for this trial: `allowed_width`, or less if that does not pay as measured; 1 if it cannot grow."""
    if not trial.can_grow:
        return 1
    return int(min(allowed_width(state, most), widest_paying(scaling_overhead(trial))))


def change_pays(state: State, trial: Trial, width: int, other: int) -> bool:
    """Whether width ``other`` pays by DynamicFluid's rules, with measured times.

    A wider one has to end the trial sooner, a narrower one to take fewer device-seconds.
    A beta that was not measured is taken to be 1 for growing, since growing on idle devices takes nothing from others.
    Shrinking gives devices to others, and there it is taken to be the largest that the model allows, 1 + 1/d.
    """
    before, after = seconds_left(state, trial, width), seconds_left(state, trial, other)
    if other < width and not knows_scaling(trial):
        beta = 1 + 1 / allowed_width(state)
        after = before * scaled(beta, other) / scaled(beta, width)
    return resize_pays(before, after, width, other, EPSILON)


def growth_pays(state: State, trial: Trial, most: int, later: float = 0.0) -> bool:
    """Whether it would be done sooner with more devices than it has, in a job of ``most`` devices.

    later: seconds until they would be of use. Until then it goes on with what it has, and a resize comes after that.
    """
    if not (trial.can_grow and trial.worth_growing):
        return False
    if not trial.devices:
        return True
    limit = widest(state, trial, most)
    before, after = seconds_left(state, trial, current_width(state, trial)), seconds_left(state, trial, limit)
    if limit <= len(trial.devices) or before <= later:
        return False
    return later + EPSILON + after * (1 - later / before) < before


# Narrow: the packing limit c


def planned_c(state: State) -> int:
    """c as StaticFluid is given it: c, or fewer where a device's memory is known to hold fewer trials."""
    if state.sharing is not None:
        return min(state.c, state.sharing.memory_limit())
    return state.c if state.search is None else min(state.c, state.search.ceiling)


def asked_slots(state: State, trial: Trial) -> int:
    """Slots of a device that the script itself asked for, by the trial's share or by its group's concurrency."""
    asked = trial.slots_by_share
    group = trial.group
    if not group.synchronous and group.concurrency and state.devices:
        spread = -(-group.concurrency // len(state.devices))
        asked = max(asked, min(spread, max(state.c, state.concurrent_packing)))
    return asked


def most_sharing(state: State, trial: Trial) -> int:
    """How many trials may share a device with this one, itself included.

    An asynchronous group without a concurrency runs one trial for each share asked for, as stock Ray Tune does, however
    many could be packed; unless c was searched for and so found to pay, since then its trials come out sooner. Under a
    lane policy memory does not count here: `Sharing` refuses what does not fit.
    """
    if trial.gang > 1:
        return 1
    asked = asked_slots(state, trial)
    if not trial.group.synchronous and trial.group.concurrency is None and state.search is None:
        return asked
    return max(state.c if state.sharing else planned_c(state), asked)

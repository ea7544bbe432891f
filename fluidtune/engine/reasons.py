"""Why the engine gives an instruction, why a trial waits, and why one is refused: a closed list of reasons, with the
numbers that decided.

Nothing is decided here. The modules that decide make a `Why` with each instruction, wait and refusal. A new reason is a
member of `Reason`, used where it decides, a row in docs/engine.md, and a scenario in tests/engine/test_reasons.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from string import Formatter
from typing import Any


class Reason(Enum):
    """Each member: its sentence, and of a wait or a refusal a remedy.

    docs/engine.md says when each comes about. In a sentence ``{name:noun}`` is the number with the noun ("3 trials"),
    ``{name:s}`` a duration, ``{name:%}`` a part.
    """

    #: The sentence of one case.
    template: str
    #: Names of the numbers in it, whose units are in docs/engine.md.
    numbers: tuple[str, ...]
    #: Of a wait or a refusal: what a user can do, or what ends it; else "".
    remedy: str

    FREE_DEVICE = "{idle:device} idle, {waiting:trial} waiting"
    SPARE_DEVICES = "{idle:device} idle, {waiting:trial} waiting; {left_to:s} left on {to:device}, {left:s} on one"
    NODE_FREE = "one node had the {to:device} that it needs at once, {waiting:trial} waiting"
    OPEN_SHARE = (
        "a device that is divided for {slots:trial} had room, and now has {there:trial}; {waiting:trial} waiting"
    )
    PACKING = "no device idle, {waiting:trial} waiting, and up to {limit:trial} may share a device: it now has {there}"
    PACKING_SAMPLED = (
        "no device idle, {waiting:trial} waiting; it is measured if {tried:trial} on one device pay, so far {limit}"
    )
    IDLE_DEVICES = (
        "{idle:device} idle, no trial waits for them; {left_to:s} left on {to:device} instead of {left:s} on {width},"
        " and a resize costs {resize:s}"
    )
    WAITING_TRIALS = (
        "{waiting:trial} waiting, for which {wanted:device} lacked; {left_to:s} left on {to:device} instead of"
        " {left:s} on {width}"
    )
    BALANCE = (
        "trials that would end later at their widths can use its devices; {left_to:s} left on {to:device} instead of"
        " {left:s} on {width}"
    )
    SLOWER = "an iteration takes {seconds:s} on {width:device}, and {seconds_to:s} on {to}"
    GROWTH_ENDED = "several workers do not help it: {to:device} instead of {width}"
    LEAVING_DEVICE = "{leaving} of its {width:device} will be lost soon"
    PACKING_REJECTED = (
        "beside others an iteration takes {ratio} times as long as the {alone:s} alone: the last of {tried:trial} adds"
        " {benefit:%} of a device, and above {least:%} is worth it; {samples:iteration} measured"
    )
    PACKING_HOPELESS = (
        "one iteration among {tried:trial} took {ratio} times as long as the {alone:s} alone, and {most} times is the"
        " limit"
    )
    OWN_DEVICE = (
        "{idle:device} idle; {left_to:s} left on {to:device} of its own instead of {left:s} at its share of {width}"
    )
    TRIAL_LEFT = "the trial has left its devices"
    RESIZE_DONE = "the trial now has {to:device}"
    RESIZE_FAILED = "the trial stays on {to:device}"
    WORKER_LOST = "the trial lost a worker, and has {to:device} now"
    DEVICE_LOST = "the trial lost a device"
    DEVICES_BUSY = (
        "trials hold all devices",
        "it starts when a device is free and no trial is before it; more devices, or trials that share one, make that"
        " sooner",
    )
    SEARCH_OVER = (
        "trials hold all devices, and at most {limit} may share one",
        "it starts when a trial leaves a device and no trial is before it; more devices make that sooner",
    )
    NO_DEVICE = (
        "the job has no device",
        "`fluidtune doctor` says which devices Ray has, and `fluidtune arbiter status` why a job has no lease",
    )
    DEVICES_LEAVING = (
        "the job has only devices that will be lost soon",
        "it starts on the next device that the job gets",
    )
    GROUP_FULL = (
        "as many trials of its group run as may at once, {at_once}",
        "a larger TuneConfig(max_concurrent_trials=...), or none",
    )
    NODE_BUSY = (
        "it asks for {asked:device} of one node, and no node has so many idle",
        "devices of one node are kept idle for it when it is next",
    )
    KEPT_IDLE = (
        "the idle devices are kept for a trial that needs several of one node",
        "it starts after that trial has started; trials that ask for fewer devices make that sooner",
    )
    NO_ROOM = (
        "no device that others hold has room for it, as far as its need of memory is known",
        "it starts when trials leave a device; less memory for each trial makes that sooner",
    )
    PAUSED = (
        "Tune paused it",
        "its algorithm says when it goes on or ends, often when the other trials of its group have reported",
    )
    NODE_SMALL = (
        "it asks for {asked:device} of one node, and no node of the job has more than {largest}",
        "ask for less, or start a larger node",
    )
    JOB_SMALL = (
        "it asks for {asked} {noun}s, and the job may have {largest}",
        "ask for less, or give the job more devices",
    )
    DEVICE_PARTS = ("it asks for {asked} {noun}s", "ask for a whole number or for 1 or less")
    LEASED_FEWER = (
        "it asks for {asked:device}, the first trial of the job for {first}, which the arbiter leases together",
        "let the first trial ask for as many, or run the job without arbiter",
    )
    RESOURCE_LACKING = (
        "it asks for {asked} {resource}, the job's first trial for {first}, and its workers are made for that one",
        'let the first trial ask for as much, too; if it lacks a GPU or CPU, devices="gpu" or "cpu" does as well',
    )
    SEVERAL_BUNDLES = (
        "it asks for several bundles or a certain place ({resource}), the job's first trial for one bundle anywhere",
        "ask for one in all of them; with devices on demand Ray runs a trial that asks for several when it is made",
    )

    def __init__(self, template: str, remedy: str = "") -> None:
        self.template, self.remedy = template, remedy
        self.numbers = tuple(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name))

    @property
    def label(self) -> str:
        """Its name in the event log, such as "waiting_trials"."""
        return self.name.lower()


class _Number(float):
    """A number in a sentence; see `Reason`."""

    def __format__(self, spec: str) -> str:
        if spec == "s":
            return f"{float(self):.3g} s"
        if spec == "%":
            return f"{float(self):.0%}"
        number = f"{float(self):.3g}"
        return number if not spec else f"{number} {spec}" + ("" if number == "1" else "s")


@dataclass(frozen=True)
class Why:
    """A reason of one case, and by name the numbers that decided, in the order of `Reason.numbers`. A name is a text.

    See `because`.
    """

    reason: Reason
    numbers: tuple[tuple[str, float | str], ...]

    @property
    def words(self) -> str:
        """The reason and its numbers in words, for people."""
        return self.reason.template.format_map(
            {name: number if isinstance(number, str) else _Number(number) for name, number in self.numbers}
        )

    def as_fields(self) -> dict[str, Any]:
        """The fields of an event in the event log that say why."""
        return {"reason": self.words, "why": self.reason.label, "numbers": dict(self.numbers)}


def because(reason: Reason, **numbers: float | str) -> Why:
    """The reason with its numbers, given in any order. Raises ValueError if they are not those of the reason."""
    if numbers.keys() != set(reason.numbers):
        raise ValueError(f"the reason {reason.label!r} has the numbers {reason.numbers}, not {tuple(numbers)}")
    given = ((name, numbers[name]) for name in reason.numbers)
    return Why(reason, tuple((name, number if isinstance(number, str) else float(number)) for name, number in given))

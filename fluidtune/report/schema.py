"""Which events there are, the fields of each, and what readers take a field for.

docs/events.md says what the fields mean, in which units; a test holds the names equal. An event that lacks what readers
rely on comes from another version, or from somebody who has edited the log: it is counted and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fluidtune.errors import FluidTuneError


class EventLogError(FluidTuneError):
    """An event that the schema does not allow, or a file that is not an event log."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_whole(value: Any) -> bool:
    # JSON's own numbers are floats, which have all integers up to here (RFC 8259, section 6).
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_device(value: Any) -> bool:
    return isinstance(value, dict) and _is_whole(value.get("device")) and "node" in value


def _is_best(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("trial"), str) and _is_number(value.get("metric"))


def _list_of(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(each, value))


def _table_of(each: Callable[[Any], bool], key: Callable[[str], bool] = lambda key: True) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(each, value.values())) and all(map(key, value))


#: What a value may be taken for.
FORMS: Mapping[str, Callable[[Any], bool]] = {
    "given": lambda value: True,
    "text": lambda value: isinstance(value, str),
    "number": _is_number,
    "amount": lambda value: _is_number(value) and value >= 0,
    "size": lambda value: _is_number(value) and value > 0,
    "whole": _is_whole,
    "count": lambda value: _is_whole(value) and value > 0,
    "table": _table_of(lambda value: True),
    "texts": _list_of(lambda each: isinstance(each, str)),
    "places": _list_of(_is_whole),
    "devices": _list_of(_is_device),
    "best": _is_best,
    "numbers": _table_of(_is_number),
    "outcomes": _table_of(_table_of(_is_whole)),
    "batches": _table_of(_table_of(_is_whole, key=str.isdecimal)),
}


class EventSchema(NamedTuple):
    """The names of the fields that one event must carry, and of those that it may carry.

    ``relied``: of the fields that readers rely on the name, whether it may be left out, the form, and whether it may be
    null.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    relied: tuple[tuple[str, bool, str, bool], ...]

    @classmethod
    def of(cls, fields: str) -> EventSchema:
        """From ``name:form``. A "?" behind a name: it may be left out. Behind a form: it may be null.

        Readers rely on no field without a form.
        """
        pairs = [field.partition(":") for field in fields.split()]
        names = [name for name, _, _ in pairs]
        relied = [(name.rstrip("?"), "?" in name, form.rstrip("?"), "?" in form) for name, _, form in pairs if form]
        must = tuple(name for name in names if "?" not in name)
        return cls(must, tuple(name.rstrip("?") for name in names if "?" in name), tuple(relied))


#: Every event.
SCHEMA = {
    name: EventSchema.of(fields)
    for name, fields in {
        "run_started": "run ray fluidtune python machine kind:given devices:devices settings:table algorithm metric"
        " mode pid?:whole? no_keep?",
        "device_gained": "device:whole node:given",
        "device_lost": "device:whole reason?",
        "device_returned": "device:whole",
        "device_sample": "device:whole utilisation:amount? memory_used:amount memory_total:size processes index? uuid?"
        " name? mig? driver?",
        "group_announced": "group:text synchronous:given algorithm concurrency?:whole?",
        "trial_added": "trial:text group:text kind:text iterations:amount? share?:amount name? growable? parameters?",
        "kind_found": "trial:text kind:text",
        "can_grow": "trial:text",
        "trial_waits": "line:whole trials:texts reason:text why numbers",
        "trial_started": "trial:text devices:places share:amount resumed:given reason? why? numbers?",
        "trial_result": "trial:text iteration:amount seconds:amount width:amount metric:number? iterations?:count"
        " began?:number memory? kept?",
        "trial_silent": "trial:text seconds:amount usual",
        "resize_started": "trial:text devices_from:places devices_to:places reason why? numbers?",
        "resized": "trial:text devices:places reason? why?",
        "resize_failed": "trial:text devices:places reason",
        "not_committed": "trial:text reason",
        "growth_checked": "trial:text verdict:text reason module?:text",
        "divided": "trial:text workers:size seconds:amount stall:amount",
        "growth_ended": "trial:text reason",
        "suspend_asked": "trial:text reason why? numbers?",
        "trial_suspended": "trial:text reason?",
        "trial_ended": "trial:text ending:text reason? why? numbers?",
        "worker_started": "worker device:whole pid seconds:amount forked? spare? mps?",
        "spare_taken": "worker device",
        "worker_lost": "worker:given device:whole reason",
        "worker_killed": "worker device reason",
        "recovered": "trial:text iteration:given reason",
        "went_on": "trial:text iteration:whole reported:whole",
        "room_lacking": "trial:text device:given memory reason",
        "steered": "act kind:given trial:text by:given via:given state:given clone? parameters? from_checkpoint?"
        " reason?",
        "notice": "seconds saved stopped",
        "run_ended": "seconds trials best:best?",
        # Of a service (`fluidtune serve`), whose workers are the model processes.
        "serving_started": "run ray fluidtune python machine kind devices?:amount slo starts trials",
        "model_measured": "trial seconds delays",
        "models_placed": "devices reason attainment",
        "models_kept": "reason",
        "model_moved": "trial device what reason",
        "version_changed": "trial version state run? share? reason?",
        "served": "seconds:size requests:outcomes batches:batches waited:numbers busy:amount devices:amount",
        "devices_wanted": "devices wanted:number",
        "serving_failed": "reason",
        "serving_ended": "seconds",
    }.items()
}


def check_event(event: str, fields: Mapping[str, Any]) -> None:
    """Raise `EventLogError` unless ``event`` exists and has all required and no unknown ``fields``."""
    schema = SCHEMA.get(event)
    if schema is None:
        raise EventLogError(f"unknown event {event!r}; the events are {', '.join(sorted(SCHEMA))}")
    missing = [name for name in schema.required if name not in fields]
    if missing:
        required = ", ".join(schema.required)
        raise EventLogError(f"event {event!r} lacks {', '.join(missing)}; it must carry {required}")
    unknown = [name for name in fields if name not in schema.required + schema.optional]
    if unknown:
        allowed = ", ".join(schema.required + schema.optional)
        raise EventLogError(f"event {event!r} has no field {', '.join(unknown)}; its fields are {allowed}")


def is_readable(event: Mapping[str, Any]) -> bool:
    """Whether the event has what readers rely on. Of one that they do not know they rely on its time alone."""
    relied = SCHEMA[event["event"]].relied if event["event"] in SCHEMA else ()
    return _is_number(event["t"]) and all(
        (null and event[name] is None) or FORMS[form](event[name]) if name in event else absent
        for name, absent, form, null in relied
    )

"""What readers of an event log rely on: the fields of each event that must be there, and what they take them for.

An event that lacks it cannot be read: it is counted and left out, by whoever reads a log. Such an event comes from
another version, or from somebody who has edited the log. docs/events.md says what the fields mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


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
    "places": _list_of(_is_whole),
    "devices": _list_of(_is_device),
    "best": _is_best,
    "numbers": _table_of(_is_number),
    "outcomes": _table_of(_table_of(_is_whole)),
    "batches": _table_of(_table_of(_is_whole, key=str.isdecimal)),
}

#: Event -> fields and their forms. A "?" behind a field: it may be left out. Behind a form: it may be null.
RELIED_ON = {
    "run_started": "kind:given devices:devices settings:table",
    "device_gained": "device:whole node:given",
    "device_lost": "device:whole",
    "device_returned": "device:whole",
    "device_sample": "device:whole utilisation:amount? memory_used:amount memory_total:size",
    "group_announced": "group:text synchronous:given concurrency?:whole?",
    "trial_added": "trial:text group:text kind:text iterations:amount? share?:amount",
    "kind_found": "trial:text kind:text",
    "can_grow": "trial:text",
    "trial_started": "trial:text devices:places share:amount resumed:given",
    "trial_result": "trial:text iteration:amount seconds:amount width:amount metric:number? iterations?:count"
    " began?:number",
    "trial_silent": "trial:text seconds:amount",
    "resize_started": "trial:text devices_from:places devices_to:places",
    "resized": "trial:text devices:places seconds:amount share?:amount?",
    "resize_failed": "trial:text devices:places",
    "not_committed": "trial:text",
    "growth_checked": "trial:text verdict:text module?:text",
    "divided": "trial:text workers:size seconds:amount stall:amount",
    "growth_ended": "trial:text",
    "suspend_asked": "trial:text",
    "trial_suspended": "trial:text",
    "trial_ended": "trial:text ending:text",
    "worker_started": "device:whole seconds:amount",
    "worker_lost": "worker:given device:whole trial?:text?",
    "recovered": "trial:text iteration:given",
    "room_lacking": "trial:text device:given",
    "steered": "kind:given trial:text by:given via:given state:given",
    "run_ended": "best:best?",
    "serving_started": "devices?:amount",
    "served": "seconds:size requests:outcomes batches:batches waited:numbers busy:amount devices:amount",
    "devices_wanted": "wanted:number",
}


def _parsed(fields: str) -> list[tuple[str, bool, str, bool]]:
    """Each field's name, whether it may be left out, its form, and whether it may be null."""
    pairs = [field.split(":") for field in fields.split()]
    return [(name.rstrip("?"), "?" in name, form.rstrip("?"), "?" in form) for name, form in pairs]


_NEEDS = {event: _parsed(fields) for event, fields in RELIED_ON.items()}


def is_readable(event: Mapping[str, Any]) -> bool:
    """Whether the event has what readers rely on. Of one that they do not know they rely on its time alone."""
    return _is_number(event["t"]) and all(
        (null and event[name] is None) or FORMS[form](event[name]) if name in event else absent
        for name, absent, form, null in _NEEDS.get(event["event"], ())
    )

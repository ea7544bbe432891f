"""The user's end: which run and trial are meant, what was typed, and why nobody answers, in words."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fluidtune.errors import FluidTuneError
from fluidtune.report.events import EventDict, read_events, this_machine
from fluidtune.report.trial_lookup import log_of_run
from fluidtune.steering.acts import Act, Kind
from fluidtune.steering.json_values import cut, read_json
from fluidtune.steering.steering_link import own_name, send

ENDED = "the run has ended"
#: How a search is started that can be steered.
HOW = "start it with `fluidtune run --steer SCRIPT`, or with FluidExecutor(steer=True)"


class SteeringRefused(FluidTuneError):
    """Nothing was done. The message says why."""


def parameters_from(pairs: Iterable[str]) -> dict[str, Any]:
    """The values of ``NAME=VALUE``, each value as JSON.

    Raises:
        SteeringRefused: there is no ``=``, the value is no JSON (`read_json`), or a name comes twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        text, equals, value = pair.partition("=")
        name = text.strip()
        if name in found:
            raise SteeringRefused(f"{cut(name)} is set twice")
        try:
            if not name or not equals:
                raise ValueError("there is no name or no =")
            found[name] = read_json(value)
        except ValueError as error:
            shown = cut(name) or "NAME"
            raise SteeringRefused(
                f"{cut(pair)!r} is no NAME=VALUE with a value in JSON, such as {shown}=0.01, {shown}=true or "
                f'{shown}="text": {error}'
            )
    return found


def ask(
    run_dir: str | os.PathLike[str],
    kind: Kind,
    trial: str,
    pairs: Iterable[str] = (),
    from_checkpoint: bool = False,
) -> str:
    """Steer a trial of the run in ``run_dir`` from the command line.

    ``trial``: its id, its name, or the beginning of its id; the driver finds it, also before it is in the log. Returns
    what was done, in words.

    Raises:
        SteeringRefused: nothing was done.
        FluidTuneError: there is no such run.
    """
    act = Act(uuid.uuid4().hex, kind, trial, own_name(), "command line", parameters_from(pairs), from_checkpoint)
    return ask_driver(log_of_run(run_dir), act)


def ask_driver(log: Path, act: Act) -> str:
    """Have the driver that writes this log do what is asked for. Returns what was done, in words.

    Raises:
        SteeringRefused: nothing was done.
        FluidTuneError: no answer came, and it is not known whether anything was done.
    """
    try:
        answer = send(log.parent, act)
    except OSError:
        raise SteeringRefused(_why_silent(read_events(log)))
    except EOFError as error:
        if "run_ended" in _newest(read_events(log)):
            raise SteeringRefused(ENDED)
        raise FluidTuneError(f"{error}, and may have saved the act: see fluidtune why, once the run is restored")
    if answer.refused:
        raise SteeringRefused(answer.words)
    return answer.words


def _newest(events: Sequence[EventDict]) -> dict[str, EventDict]:
    """The newest event of each kind that the run's newest driver has written."""
    last: dict[str, EventDict] = {}
    for event in events:
        if event["event"] == "run_started":
            last.clear()
        last[event["event"]] = event
    return last


def _why_silent(events: Sequence[EventDict]) -> str:
    """Why no driver answers, from the run's log."""
    last = _newest(events)
    began = last.get("run_started", {})
    if "run_ended" in last:
        return ENDED
    if not (began.get("settings") or {}).get("steer"):
        return f"this search cannot be steered: {HOW}"
    if began.get("machine") != this_machine():
        return f"the driver of this run is on another machine, and is steered there: {began.get('machine')}"
    return "no driver of this run answers: it has just ended, or has died; Tuner.restore goes on with a run"

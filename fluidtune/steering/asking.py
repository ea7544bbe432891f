"""The user's end: which run and trial are meant, and what was typed, in words."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from typing import Any

from fluidtune.report.run_logs import find_log
from fluidtune.steering.acts import Act, Kind
from fluidtune.steering.json_values import cut, read_json
from fluidtune.steering.steering_files import SteeringRefused, ask_driver, own_name


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

    ``trial``: see `fluidtune.report.trial_lookup.trial_called`; the driver finds it, also before it is in the log.
    Returns what was done, in words.

    Raises:
        SteeringRefused: nothing was done.
        FluidTuneError: there is no such run.
    """
    act = Act(uuid.uuid4().hex, kind, trial, own_name(), "command line", parameters_from(pairs), from_checkpoint)
    return ask_driver(find_log(run_dir), act)

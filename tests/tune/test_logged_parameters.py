"""What the event log has of a trial's parameters: what the search chose, with its values now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from fluidtune.report.events import EVENT_LOG_NAME, read_events
from fluidtune.tune.trial_registry import VALUE_LENGTH, parameters_of
from tests.report.makers import log_in


def of(evaluated: dict[str, Any] | None, config: dict[str, Any]) -> dict[str, Any]:
    return parameters_of(cast(Any, SimpleNamespace(evaluated_params=evaluated, config=config)))


def test_the_values_are_those_of_the_configuration_now() -> None:
    """PBT changes these. What the search has not chosen, such as a key to some service, is left out."""
    config = {"lr": 0.2, "net": {"width": 8}, "api_key": "secret"}
    assert of({"lr": 0.1, "net/width": 4}, config) == {"lr": 0.2, "net/width": 8}
    assert of({"layers/0": 3, "gone": 1}, {"layers": [4]}) == {"layers/0": 3, "gone": 1}
    assert of(None, config) == of({}, config) == {}


def test_every_value_can_be_written_and_is_short(tmp_path: Any) -> None:
    odd = {"a": np.float32(0.5), "b": float("nan"), "c": "x" * 1000, "d": len, "e": None, "f": True, "g": [1, 2]}
    found = of(odd, odd)
    log = log_in(tmp_path)
    log.write("trial_added", trial="t", group="g", kind="plain", iterations=1, parameters=found)
    log.close()
    read = read_events(tmp_path / EVENT_LOG_NAME)[0]["parameters"]
    assert (read["a"], read["b"], read["e"], read["f"], read["g"]) == (0.5, None, None, True, "[1, 2]")
    assert len(read["c"]) == VALUE_LENGTH and read["d"] == "<built-in function len>"

"""The random streams of a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.elastic import random_streams


def test_the_device_of_a_trial_is_that_of_its_own_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = {name: SimpleNamespace(get_rng_state=lambda device: device) for name in ("cuda", "xpu")}
    monkeypatch.setattr(random_streams, "started", lambda: made)
    monkeypatch.setitem(random_streams.sys.modules, "torch", SimpleNamespace(get_rng_state=lambda: ""))  # type: ignore
    streams = random_streams.capture_streams("xpu:1")
    assert (streams["cuda"], streams["xpu"]) == ("cuda", "xpu:1")

"""Drawing the pictures takes one or two seconds per run, so only the tests that look at them draw them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("ray") or "pictures" in request.node.name:
        return
    from fluidtune.tune import final_report

    monkeypatch.setattr(final_report, "write_report", lambda log: None)
    monkeypatch.setattr(final_report, "_import_matplotlib", lambda: None)

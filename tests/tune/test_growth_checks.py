"""Which growths of a job are rehearsed."""

from __future__ import annotations

import pytest

from fluidtune.elastic.checks.verdict import Verdict
from fluidtune.tune.growth_checks import VARIABLE, GrowthChecks


def test_the_first_growth_is_rehearsed_and_all_after_one_that_differed(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    checks = GrowthChecks()
    assert checks.due()
    checks.heard(Verdict("unknown", "noise"))
    assert not checks.due()
    checks.heard(Verdict("differs", "weights of classes"))  # it was under way, too
    assert checks.due()
    checks.heard(Verdict("same"))
    assert checks.due()


@pytest.mark.parametrize(("value", "always"), [("1", True), ("0", False)])
def test_the_variable_has_all_rehearsed(monkeypatch, value, always):
    monkeypatch.setenv(VARIABLE, value)
    checks = GrowthChecks()
    checks.heard(Verdict("same"))
    assert checks.due() is always

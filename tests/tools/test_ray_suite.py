"""The comparison of Ray Tune's own tests under stock and under FluidTune."""

from __future__ import annotations

import json
from pathlib import Path

from tools import ray_suite
from tools.ray_suite import Outcome

GOOD, BAD, LEFT = (
    f"ray/tune/tests/test_api.py::{name}" for name in ("TestRun::test_good", "test_bad[1.5]", "test_left")
)


def checkout(directory: Path) -> Path:
    tests = directory / "python" / "ray" / "tune" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_api.py").touch()
    (tests / "helper.py").touch()
    return directory


def passed(*tests: str) -> dict[str, Outcome]:
    return {test: Outcome("passed", True) for test in tests}


def failed(*tests: str) -> dict[str, Outcome]:
    return {test: Outcome("failed", True) for test in tests}


def test_a_test_that_fails_twice_makes_the_command_fail(tmp_path, capsys) -> None:
    # A test that passes the second time has passed.
    fluid = [{**passed(GOOD), **failed(BAD, LEFT)}, {**passed(LEFT), **failed(BAD)}]
    outcomes = {"stock": [passed(BAD, LEFT)], "fluid": fluid}
    ran = lambda place, side, tests, logs: outcomes[side].pop(0)  # noqa: E731
    assert ray_suite.main([str(checkout(tmp_path))], lambda *_: None, ran) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["not_listed"] == said["differences"] == ["test_api.py::test_bad[1.5]"]
    assert said["with_executor_pass_fluidtune"] == 2 and said["with_executor_pass_stock"] == 1

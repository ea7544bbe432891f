"""The options of `fluidtune run` are read without click as click reads them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fluidtune.cli
from fluidtune.tune.executor import FluidExecutor
from fluidtune.tune.run_options import OPTIONS, read

NAMES = [name for names, _, _ in OPTIONS for name in names.split("/")]
ODD = ["-", "--", "-h", "-x", "--help", "--lanes=", "--shared=1", "--max-packing=3", "--devices=cpu:2", "two", "3", ""]


@given(st.lists(st.sampled_from([*NAMES, *ODD, "s.py", "0.5"]), max_size=6))
@example(["--device-memory", "10", "--", "-s.py", "--", "x"])
@example(["--no-fork-server", "--fork-server", "s.py", "-m"])
@settings(max_examples=300, deadline=None)
def test_what_is_given(words: list[str]) -> None:
    by_click: list[Any] = []
    with patch.object(fluidtune.cli, "run_script", lambda *given: by_click.append(given)):
        done = CliRunner().invoke(fluidtune.cli.cli, ["run", *words])
    found = read(words)
    if found is None:
        assert not by_click and done.output.startswith(("Usage:", "Error: Option"))
        return
    ((rest, chosen),) = by_click
    flags = {
        names.partition("/")[0].lstrip("-").replace("-", "_"): "/" in names
        for names, kind, _ in OPTIONS
        if kind is bool
    }
    assert rest == found[0] and chosen == flags | found[1]


def test_each_setting_has_an_option() -> None:
    options = {names.partition("/")[0].lstrip("-").replace("-", "_") for names, _, _ in OPTIONS} - {"m"}
    assert {name.replace("arbiter", "shared") for name in vars(FluidExecutor())} == options

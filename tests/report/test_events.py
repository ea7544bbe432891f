"""The event log: its schema, its lines, and what remains of it when the driver is killed."""

from __future__ import annotations

import json
import re
import resource
import time
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from fluidtune.report.events import EVENT_LOG_NAME, EventLogError, read_events
from fluidtune.report.schema import SCHEMA
from tests.report.makers import log_in
from tests.salus.processes import at_most

REPO = Path(__file__).parents[2]


def test_the_docs_name_the_events_and_fields_of_the_code():
    page = (REPO / "docs" / "events.md").read_text().partition("## The events\n")[2]
    found = {}
    for section in page.split("\n### ")[1:]:
        name, _, text = section.partition("\n")
        rows = re.findall(r"^\| `(\w+)`( \(optional\))? \| .+ \|$", text, re.MULTILINE)
        must, may = ([field for field, is_optional in rows if bool(is_optional) is kind] for kind in (False, True))
        found[name] = (tuple(must), tuple(may))
    assert list(found.items()) == [(name, schema[:2]) for name, schema in SCHEMA.items()]


@pytest.mark.parametrize("name", list(SCHEMA))
def test_an_event_is_written_with_all_of_its_fields_and_refused_without_one_by_name(tmp_path, name):
    log = log_in(tmp_path)
    for field in SCHEMA[name].required:
        rest = dict.fromkeys([other for other in SCHEMA[name].required if other != field], 1)
        with pytest.raises(EventLogError, match=rf"'{name}' lacks {field};"):
            log.write(name, **rest)
    assert (tmp_path / EVENT_LOG_NAME).read_bytes() == b""
    fields = dict.fromkeys([*SCHEMA[name].required, *SCHEMA[name].optional], 1)
    log.write(name, **fields)
    written = json.loads((tmp_path / EVENT_LOG_NAME).read_text())
    assert abs(written.pop("t") - time.time()) < 60 and written == {"event": name, **fields}


def test_unknown_events_and_fields_are_refused_with_what_is_allowed(tmp_path):
    log = log_in(tmp_path)
    with pytest.raises(EventLogError, match=r"unknown event 'trial_begun'.*trial_started"):
        log.write("trial_begun", trial="a")
    with pytest.raises(EventLogError, match=r"no field end; its fields are trial, ending, reason"):
        log.write("trial_ended", trial="a", ending="failed", end=3)
    assert (tmp_path / EVENT_LOG_NAME).read_bytes() == b""


def test_values_become_json(tmp_path):
    log = log_in(tmp_path, clock=lambda: 5.0)
    log.write("trial_started", trial="a", devices=(0, np.int64(1)), share=Fraction(1, 4), resumed=np.bool_(1))
    log.write("trial_result", trial="a", iteration=1, seconds=np.float32(0.5), width=1, metric=float("nan"))
    log.write("trial_result", trial="a", iteration=2, seconds=1, width=1, metric=np.array(-np.inf))
    log.write("trial_result", trial="a", iteration=3, seconds=1, width=1, metric=np.array(2.5))
    log.write(
        "run_started",
        **{
            **dict.fromkeys(SCHEMA["run_started"].required),
            "devices": [],
            "settings": {"p": Path("/x"), "s": {2, 1}, 3: [np.inf]},
        },
    )
    one, two, three, four, five = read_events(tmp_path / EVENT_LOG_NAME)
    assert one == {
        "t": 5.0,
        "event": "trial_started",
        "trial": "a",
        "devices": [0, 1],
        "share": 0.25,
        "resumed": True,
    }
    assert (two["seconds"], two["metric"], three["metric"], four["metric"]) == (0.5, None, None, 2.5)
    assert five["settings"] == {"p": "/x", "s": [1, 2], "3": [None]}


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("size", range(1, 45, 4))
def test_a_log_goes_on_after_a_line_cut_anywhere(tmp_path, size, kept):
    """Seen: a log whose first line was cut within its first six bytes was refused once a driver went on with it."""
    path = tmp_path / EVENT_LOG_NAME
    with closing(log_in(tmp_path)) as log:
        for _ in range(kept + 1):
            log.write("trial_suspended", trial="a")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:size])
    assert (len(read_events(path)), read_events(path).dropped) == (kept, 1)
    with closing(log_in(tmp_path)) as log:
        log.write("trial_suspended", trial="b")
    assert ([event["trial"] for event in read_events(path)], read_events(path).dropped) == (["a"] * kept + ["b"], 1)


@pytest.mark.parametrize(
    "content",
    ["hello\n", '{"loss": 1.0, "timestamp": 3}\n', "[1, 2]\n", "\x00\x01\n", '{"t": "x", "event": "a"}\n'],
)
def test_another_file_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(EventLogError, match=r"result\.json is not a FluidTune event log: line 1"):
        read_events(path)


def test_a_closed_log_refuses(tmp_path):
    log = log_in(tmp_path)
    log.close()
    log.close()
    with pytest.raises(EventLogError, match="closed"):
        log.write("trial_suspended", trial="a")


def test_after_a_line_that_was_cut_off_the_next_one_is_whole(tmp_path: Path) -> None:
    """A disk that is full for a while: the kernel takes a part of a line, and then nothing."""
    log = log_in(tmp_path, clock=lambda: 5.0)
    with at_most(resource.RLIMIT_FSIZE, (tmp_path / EVENT_LOG_NAME).stat().st_size + 7):
        log.write("spare_taken", worker="w1", device=1)
    assert isinstance(log.lost, OSError)
    log.write("spare_taken", worker="w2", device=1)
    found = read_events(tmp_path / EVENT_LOG_NAME)
    assert [event["worker"] for event in found] == ["w2"] and found.dropped == 1
    # What somebody else has written into it is left out, too.
    with (tmp_path / EVENT_LOG_NAME).open("a") as file:
        file.write('{"loss": 1.0}\n')
    assert read_events(tmp_path / EVENT_LOG_NAME).dropped == 2

"""The page as one file: it needs nothing else, and what trials say is not markup in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.report.json_text import plain_json
from fluidtune.view.page_file import STORIES, whole_page
from tests.report.makers import added, begin, ended, result, started, written
from tests.report.test_summary import by_hand

EVIL = "</script><img src=x onerror=alert(1)><!--<script>"


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="snapshot">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_one_file_has_all_of_a_run(tmp_path: Path) -> None:
    written(tmp_path / "run", by_hand())
    out = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "run"), "--html", str(out)])
    assert done.exit_code == 0 and f"wrote {out}" in done.output.replace("\n", "")
    page = out.read_text()
    assert not re.search(r"<(?:script|link|img)[^>]* (?:src|href)=", page)
    assert page.count("<script") == page.count("</script>") == 3
    data = data_of(page)
    assert [row[2] for row in data["run"]["trials"]] == ["c", "b", "a"]
    assert data["curves"]["c"]["metric"] == [0.7, 0.6, 0.5] and set(data["stories"]) == set("abc")


def test_what_trials_say_is_no_markup(tmp_path: Path) -> None:
    evil = {**added(0, EVIL), "name": EVIL, "parameters": {EVIL: EVIL}}
    events = [begin(0, 1, run=EVIL), evil, started(1, EVIL, 0), result(2, EVIL, 1, 1.0, 1.0, 0.5)]
    log = written(tmp_path, [*events, {**ended(3, EVIL, "failed"), "reason": EVIL}])
    page = whole_page(log)
    assert "<img" not in page and "<!--<script" not in page
    data = data_of(page)
    assert data["run"]["trials"][0][2] == EVIL and EVIL in data["stories"][EVIL]["told"][-1][2]


def test_a_long_run_has_the_stories_of_the_best_and_of_the_failed(tmp_path: Path) -> None:
    events = [begin(0, 1), *(added(0, f"t{n}") for n in range(STORIES + 8))]
    for n in range(STORIES + 8):
        events += [started(n, f"t{n}", 0), result(n, f"t{n}", 1, 1.0, 1.0, -n)]
        events += [ended(n, f"t{n}", "failed" if n < STORIES / 2 + 2 else "stopped")]
    kept = {*range(STORIES + 8)} - {0, 1, *range(STORIES // 2 + 2, STORIES // 2 + 8)}
    assert set(data_of(whole_page(written(tmp_path, events)))["stories"]) == {f"t{n}" for n in kept}


def test_no_number_of_python_alone() -> None:
    assert plain_json({"a": float("nan"), "b": [float("inf"), 1.5]}) == '{"a":null,"b":[null,1.5]}'

"""The page as text: as it is served, and as one file that holds a finished run and needs nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fluidtune.report.json_text import plain_json
from fluidtune.report.metric_values import ranked
from fluidtune.report.run_logs import find_log
from fluidtune.view.followed_run import FollowedRun

#: The page's files.
STATIC = Path(__file__).parent / "static"
#: In one file every script stands in the page, so it may run; nothing may be fetched.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
#: A file has the stories of this many trials: 2 kB each. The others' are those of `fluidtune why`.
STORIES = 1000
#: Where a file's data stands in the page.
_PLACE = "<!-- snapshot -->"


def page_text() -> str:
    """The page as it is served."""
    return (STATIC / "index.html").read_text()


def whole_page(log: Path) -> str:
    """The page with the log's run in it."""
    run = FollowedRun(log)
    shown = run.look()
    trials = [row[2] for row in shown["trials"]]
    curves = {trial: run.curve(trial) for trial in trials}
    stories = {trial: run.story(trial) for trial in _told(run, trials)}
    data = {"run": shown, "curves": curves, "stories": stories, "directory": str(log.parent)}
    # Within a script element only "<" can end it or begin a comment.
    inlined = plain_json(data).replace("<", "\\u003c")
    text = re.sub(r'<link rel="icon"[^>]*>\n', "", page_text())
    style = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')
    text = style.sub(lambda found: f"<style>{(STATIC / found[1]).read_text()}</style>", text)
    script = re.compile(r'<script( type="module")?(?: defer)? src="static/([^"]+)"></script>')
    text = script.sub(lambda found: f"<script{found[1] or ''}>{(STATIC / found[2]).read_text()}</script>", text)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    data_element = f'<script type="application/json" id="snapshot">{inlined}</script>'
    return text.replace("<!-- policy -->", policy).replace(_PLACE, data_element)


def _told(run: FollowedRun, trials: list[str]) -> list[str]:
    """The trials whose story a file has: the best ones first, then those that failed, then the others."""
    its = run.fold.trials
    best = ranked(((trial, its[trial].best) for trial in trials), run.fold.head.get("mode"))
    best_first = list(dict.fromkeys([*(trial for trial, _ in best), *trials]))
    failed_first = sorted(best_first, key=lambda trial: its[trial].state != "failed")
    return list(dict.fromkeys([*best_first[: STORIES // 2], *failed_first]))[:STORIES]


def write_page(run_dir: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the page of the run in ``run_dir`` (or of that log) as one file. Returns its path.

    Raises `NoEventLogError` if there is no log, OSError if the file cannot be written.
    """
    path = Path(out)
    path.write_text(whole_page(find_log(run_dir)), encoding="utf-8")
    return path

"""The page in a headless Chromium: a live run, a filter, a story, keys, several runs, one file, and what axe finds."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluidtune.view.page_file import write_page
from tests.browsing import watched_page
from tests.report.makers import added, begin, ended, random_run, result, started, written
from tests.view.pages import lines_of
from tests.view.test_page_file import EVIL

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def expect(place: Any) -> Any:
    """What is waited for at a place of the page."""
    from playwright.sync_api import expect

    return expect(place)


def nothing_serious(page: Any) -> None:
    """For people who see little or use keys alone, axe-core finds nothing serious in the page as it is now."""
    from axe_playwright_python.sync_playwright import Axe

    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(scheme, each["id"], each["nodes"][0]["html"][:200]) for each in serious] == []


@pytest.fixture
def page(served: Any) -> Iterator[Any]:
    """A page that must say nothing on its console, and ask nobody but this machine. It ends before its server."""
    here = re.compile(r"http://127\.0\.0\.1:|file:")
    with watched_page(lambda url: bool(here.match(url)), viewport={"width": 1280, "height": 900}) as page:
        yield page


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """Serves a directory: returns the page's URL."""
    servers: list[subprocess.Popen[str]] = []

    def serve(where: Path, *options: str) -> str:
        command = [sys.executable, "-m", "fluidtune", "view", *options, str(where)]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return servers[-1].stdout.readline().split()[0]  # type: ignore[union-attr]

    yield serve
    for server in servers:
        server.kill()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]


def named(trial: str, **parameters: Any) -> dict[str, Any]:
    return {**added(1000.0, trial), "name": trial, "parameters": parameters}


def test_a_live_run(page: Any, served: Any, tmp_path: Path) -> None:
    """Text from trials is text: a name that is markup is shown as it is."""
    events = [begin(1000, 2, run=EVIL), named("t_0", lr=0.1), named("t_1", lr=0.001), named(EVIL, lr=EVIL)]
    log = written(tmp_path / "run", [*events, started(1001, "t_0", 0), result(1002, "t_0", 1, 1.0, 1.0, 0.9)])
    page.goto(served(log.parent))
    expect(page.locator("h1")).to_have_text(EVIL)
    rows = page.locator("#rows tbody tr[data-trial]")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("0.9")
    with log.open("ab") as file:
        file.write(lines_of([started(1003, "t_1", 1), result(1004, "t_1", 1, 1.0, 1.0, 0.25)]))
    expect(rows.first).to_contain_text("0.25")  # the best one is first
    page.fill("#filter", "lr<0.01")
    expect(rows).to_have_count(1)
    page.fill("#filter", "")
    page.get_by_role("button", name="lr", exact=True).click()
    expect(rows.first).to_contain_text("t_1")
    page.get_by_role("button", name="lr", exact=True).click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("lr")
    # By keys alone: to the table, down, open, and back to the same row.
    page.locator("#rows button[tabindex='0']").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#detail")).to_be_visible()
    opened = page.locator("#detail-title").text_content()
    expect(page.locator("#story li").first).to_contain_text("added to group g")
    nothing_serious(page)
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    expect(page.locator("#rows button:focus")).to_have_text(opened)
    page.get_by_role("button", name="t_0").click()
    expect(page.locator("#curve canvas")).to_be_visible()
    with log.open("ab") as file:
        file.write(lines_of([{**ended(1005, "t_0", "failed"), "reason": EVIL}]))
    expect(page.locator("#news li").first).to_contain_text("t_0 failed")
    expect(page.locator("#story")).to_contain_text(EVIL)
    shutil.rmtree(log.parent)
    expect(page.locator("#trouble")).to_contain_text("was deleted: this is what it had")
    expect(rows).to_have_count(3)


def test_all_runs_are_not_asked_for_twice_at_a_time(page: Any, served: Any, tmp_path: Path) -> None:
    """Each question that waits holds one of the browser's few connections. Seen: the page hung."""
    asked: list[Any] = []
    page.route("**/api/runs", lambda route: asked.append(route))  # which is never answered
    page.clock.install()
    for name in ("one", "two"):
        written(tmp_path / name, [begin(time.time(), 1)])
    page.goto(served(tmp_path))
    expect(page.locator("h1")).to_have_text("All runs")
    page.clock.run_for(20_000)
    assert len(asked) == 1
    page.unroute_all(behavior="ignoreErrors")


HIDE = """hidden => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_hidden_tab_holds_no_connection(page: Any, served: Any, tmp_path: Path) -> None:
    """What came meanwhile is shown when the tab is seen. Seen: a seventh tab never opened, as a browser has six."""
    log = written(tmp_path / "run", [begin(time.time(), 1), named("t_0")])
    url = served(log.parent)
    with page.context.browser.new_context() as context:
        tabs = []
        for _ in range(7):
            tabs.append(context.new_page())
            tabs[-1].goto(url)
            expect(tabs[-1].locator("#rows tbody tr[data-trial]")).to_have_count(1)
            tabs[-1].evaluate(HIDE, True)
        with log.open("ab") as file:
            file.write(lines_of([named("t_1")]))
        tabs[0].evaluate(HIDE, False)
        expect(tabs[0].locator("#rows tbody tr[data-trial]")).to_have_count(2)
        expect(tabs[0].locator("#trouble")).to_be_hidden()


def test_a_filter_knows_every_parameter_and_takes_it_for_no_column(page: Any, served: Any, tmp_path: Path) -> None:
    """The table has no more than 12 of them. Seen: `lr<0.01` showed no trial where lr was the 13th."""
    columns = {"width": 512, "state": "solid", "kind": "resnet", "id": 7, "group": "norm", "constructor": "he"}
    many = {**{f"p{number}": number for number in range(9)}, **columns, "LR": 0.001}
    wide, bare = named("t_0", **many), named("t_1", width=64, LR=0.1)
    log = written(tmp_path / "run", [begin(time.time(), 2), wide, bare, started(1001, "t_0", 0)])
    page.goto(served(log.parent))
    rows = page.locator("#rows tbody tr[data-trial]")
    expect(rows).to_have_count(2)
    tests = {"lr<0.01": 1, "LR>=0.001": 2, "width>=512": 1, "state=solid": 1, "p3=3": 1, "running": 1}
    for text, count in {**tests, "iteration=0 trial=t_1": 1, "constructor!=he": 0, "valueof=1": 0}.items():
        page.fill("#filter", text)
        expect(rows).to_have_count(count)
    page.fill("#filter", "")
    page.get_by_role("button", name="t_0").click()
    facts = page.locator("#parameters")
    for name, value in columns.items():
        assert f"{name}{value}" in facts.text_content()
    expect(facts).to_contain_text("LR0.001staterunningkindelasticgroupg")


@pytest.mark.parametrize("ahead", [300, -300])
def test_a_browser_whose_clock_is_wrong(ahead: int, page: Any, served: Any, tmp_path: Path) -> None:
    """Whether a run is silent is for the clock of the page's server to say. Seen: each run was shown as silent."""
    page.add_init_script(f"const real = Date.now; Date.now = () => real() + {1000 * ahead};")
    for name, silent in {"alive": 0, "dead": 150}.items():
        last = time.time() - silent
        written(tmp_path / name, [begin(last - 10, 1, run=name), {**named("t"), "t": last}])
    page.goto(served(tmp_path))
    rows = page.locator("#overview-table tbody tr")
    expect(rows.filter(has_text="alive")).to_contain_text("running")
    expect(rows.filter(has_text="dead")).to_contain_text("silent")
    for name, said in {"alive": "running for 1", "dead": "nothing was written for 2 min"}.items():
        page.select_option("#runs", name)
        expect(page.locator("h1")).to_have_text(name)
        expect(page.locator("#state")).to_contain_text(said)


def test_several_runs(page: Any, served: Any, tmp_path: Path) -> None:
    for seed in range(3):
        written(tmp_path / f"run{seed}", random_run(seed, devices=2, trials=5, iterations=3))
    page.goto(served(tmp_path))
    expect(page.locator("#overview-table tbody tr")).to_have_count(3)
    expect(page.locator("#overview-plot canvas")).to_be_visible()
    nothing_serious(page)
    page.get_by_role("button", name="run1").click()
    expect(page.locator("h1")).to_have_text("random 1")
    page.reload()  # the address has the run
    expect(page.locator("h1")).to_have_text("random 1")


def test_a_narrow_screen_and_one_file(page: Any, tmp_path: Path) -> None:
    """Nothing is wider than the screen; the trial that is open covers it, and closes."""
    log = written(tmp_path / "run", random_run(5, devices=3, trials=300, iterations=2))
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(write_page(log, tmp_path / "page.html").as_uri())
    expect(page.locator("#state")).to_contain_text("ended after")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#rows tbody td.first button").first.click()
    expect(page.locator("#story li").first).to_be_visible()
    nothing_serious(page)
    page.get_by_role("button", name="close the trial").click()
    expect(page.locator("#detail")).to_be_hidden()
    # Of 300 rows those in sight are in the document; the last one comes when it is wanted.
    assert page.locator("#rows tbody tr[data-trial]").count() < 60
    page.locator("#rows button[tabindex='0']").focus()
    page.keyboard.press("End")
    expect(page.locator("#rows button:focus")).to_be_visible()
    expect(page.locator("#rows tr[aria-rowindex='301']")).to_be_visible()


STEERED = """
import sys, time
from pathlib import Path
import ray
from ray import tune

def train(config):
    for iteration in range(10_000):
        time.sleep(0.1)
        tune.report({"score": config["lr"] * iteration})
        if Path(config["gate"]).exists():
            return

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tune.Tuner(
        tune.with_resources(train, {"cpu": 0.5}),
        param_space={"lr": tune.grid_search([0.1, 0.2]), "gate": sys.argv[1] + "/gate"},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(name="run", storage_path=sys.argv[1], verbose=0),
    ).fit()
"""


@pytest.mark.ray
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("no_ray")
def test_a_live_search_is_steered_from_the_page(page: Any, served: Any, tmp_path: Path) -> None:
    """A trial is stopped and another one is cloned; a refusal is text, and a run that has ended says so."""
    page.set_default_timeout(150_000)
    script, log = tmp_path / "script.py", tmp_path / "run" / "fluid_events.jsonl"
    script.write_text(STEERED)
    command = [sys.executable, "-m", "fluidtune", "run", "--steer", "--devices", "cpu:2", str(script), str(tmp_path)]
    driver = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        until = time.monotonic() + 200
        while not log.exists() or log.read_text().count('"trial_result"') < 4:
            assert time.monotonic() < until and driver.poll() is None
            time.sleep(0.2)
        url = served(log.parent, "--steer")
        page.goto(url.split("?")[0])
        rows = page.locator("#rows tbody tr[data-trial]")
        page.locator("#rows tbody td.first button").first.click()
        expect(page.locator("#steer")).to_be_hidden()  # without the token
        page.goto(url)
        page.locator("#rows tbody td.first button").last.click()
        said = page.locator("#steered")
        page.fill("#clone-set", "rate=3")
        page.get_by_role("button", name="clone", exact=True).click()
        expect(said).to_contain_text("has no parameter rate", timeout=60_000)
        nothing_serious(page)
        keep = page.locator('#keep[title="the algorithm stops no trial"]')
        expect(keep).to_be_disabled()
        page.fill("#clone-set", "lr=0.75")
        page.get_by_role("button", name="clone", exact=True).dblclick()
        expect(said).to_contain_text("is a clone of trial", timeout=60_000)
        stop = page.get_by_role("button", name="stop", exact=True)
        for answer in ("false", "true"):  # to the question whether it is to stop
            page.evaluate(f"window.confirm = () => {answer}")
            stop.click()
        expect(said).to_contain_text("ends at its next result", timeout=60_000)
        expect(page.locator("#story")).to_contain_text("ended, as", timeout=60_000)
        expect(rows.filter(has_text="stopped")).to_have_count(1, timeout=60_000)
        expect(rows.filter(has_text="0.75")).to_have_count(1, timeout=60_000)
        expect(rows).to_have_count(3)  # a double click clones once
        (tmp_path / "gate").touch()
        assert driver.wait(120) == 0
        expect(page.get_by_role("button", name="clone", exact=True)).to_be_disabled(timeout=60_000)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()

"""`fluidtune view` on a recorded log of 10,000 trials: what it takes to open it, and to follow it.

``python -m benchmarks.view_large --json [--trials N] [--browser FILE]``. The log is that of a search by successive
halving on 64 devices, with 27 iterations of a trial in the mean. `url` is the time from the command until it printed
its address, `first` from a page's question until it has its first increment, `read` until it has all of the log.
`paint` and `table` are the same in a headless browser, if FILE (a Chromium) and the package playwright are there:
until figures are on the page, and until the table has all trials; `shown` and `shown_most` are the median and the
most seconds from a new result in the log until the page shows it, over 20 results at random moments. `mib` is the
server's resident memory then, `cores` the processor's time of the server while one page follows 20 results and 2 new
trials a second, by the time that passed.
"""

from __future__ import annotations

import heapq
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import httpx
import psutil

from benchmarks.common import finish, parser, result, say
from fluidtune.report import EVENT_LOG_NAME

DEVICES = 64
#: Iterations at which a third of the trials goes on: a search by successive halving with eta = 3.
RUNGS = (9, 27, 81, 243)
#: Results and new trials a second while the log is followed: those of 64 devices whose iterations take 3 s.
RESULTS, ARRIVALS = 20, 2
#: How many results a browser is watched for.
WATCHED = 20
#: Writes down when the page shows each of these values for the first time: the best one is among its figures.
WATCH = """(values) => {
  window.seen = {};
  const note = () => values.forEach((value) => {
    if (!(value in seen) && document.body.textContent.includes(value)) seen[value] = Date.now() / 1000;
  });
  new MutationObserver(note).observe(document.body, {childList: true, subtree: true, characterData: true});
}"""


def line(t: float, event: str, **fields: Any) -> str:
    return json.dumps({"t": round(t, 3), "event": event, **fields}) + "\n"


def write_log(path: Path, trials: int, seed: int = 1) -> float:
    """A whole run but for its end. Returns when its last event was, unix seconds."""
    rng = random.Random(seed)
    start = time.time() - 7 * 86400.0
    with path.open("w") as file:
        _head(file, start, trials)
        due = [(start + rng.random(), device, "", 0, 0) for device in range(DEVICES)]
        heapq.heapify(due)
        begun, now = 0, start
        while due:
            now, device, trial, done, rung = heapq.heappop(due)
            if trial:
                done += 1
                measured = {"iteration": done, "seconds": 2.5, "width": 1.0, "metric": 1 / done + rng.random()}
                file.write(line(now, "trial_result", trial=trial, **measured))
                if done == RUNGS[rung]:
                    rung += 1
                    if rung == len(RUNGS) or rng.random() > 1 / 3:
                        file.write(line(now, "trial_ended", trial=trial, ending="stopped"))
                        trial = ""
            if not trial:
                if begun == trials:
                    continue
                trial, done, rung, begun = f"train_4f2e1_{begun:05d}", 0, 0, begun + 1
                why = {"reason": "1 device idle", "why": "free_device", "numbers": {"idle": 1}}
                file.write(line(now, "trial_started", trial=trial, devices=[device], share=1.0, resumed=False, **why))
            heapq.heappush(due, (now + rng.uniform(2.0, 3.0), device, trial, done, rung))
    return now


def _head(file: TextIO, start: float, trials: int) -> None:
    devices = [{"device": device, "node": f"node{device // 8}"} for device in range(DEVICES)]
    versions = {"ray": "2.51", "fluidtune": "0.1.0", "python": "3.11"}
    about = {"algorithm": "ASHAScheduler", "metric": "loss", "mode": "min", "machine": "recorded", "kind": "emulated"}
    file.write(line(start, "run_started", run="large", devices=devices, settings={}, **versions, **about))
    file.write(line(start, "group_announced", group="all", synchronous=False, algorithm="ASHAScheduler"))
    for number in range(trials):
        parameters = {"lr": 10 ** -(1 + 4 * number / trials), "layers": number % 7, "optimizer": "adam"}
        named = {"trial": f"train_4f2e1_{number:05d}", "group": "all", "kind": "elastic", "parameters": parameters}
        file.write(line(start, "trial_added", iterations=243, share=1.0, **named))


def opened(url: str, opening: float) -> dict[str, float]:
    """Ask as a page does until all of the log has come."""
    found: dict[str, float] = {}
    with httpx.stream("GET", f"{url}api/stream", timeout=120) as response:
        for text in response.iter_lines():
            if text.startswith("data: "):
                change = json.loads(text[6:])
                found.setdefault("first", time.monotonic() - opening)
                if not change["left"]:
                    return {**found, "read": time.monotonic() - opening}
    raise RuntimeError("the server ended")


def painted(url: str, browser: str, log: Path, now: float) -> dict[str, float]:
    """The seconds until a headless browser shows the figures, all trials in the table, and a new result."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as play:
        page = play.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        opening = time.monotonic()
        page.goto(url)
        # Neither needs `eval`, which the page's policy forbids.
        page.locator("#rows td.first button").first.wait_for()
        paint = time.monotonic() - opening
        expect(page.locator("#state")).not_to_contain_text("reading", timeout=120_000)
        table = time.monotonic() - opening
        numbers = range(1001, 1001 + WATCHED)  # each is the best one
        page.evaluate(WATCH, [f"-{number}" for number in numbers])
        rng, written = random.Random(1), {}
        with log.open("a", buffering=1) as file:
            for number in numbers:
                time.sleep(rng.uniform(0.3, 1.3))
                measured = {"iteration": 9, "seconds": 2.5, "width": 1.0, "metric": -number}
                written[f"-{number}"] = time.time()
                file.write(line(now, "trial_result", trial="train_4f2e1_00000", **measured))
        time.sleep(5.0)
        seen = page.evaluate("() => window.seen")
        late = [seen[value] - wrote for value, wrote in written.items()]
        return {"paint": paint, "table": table, "shown": median(late), "shown_most": max(late)}


def followed(url: str, log: Path, server: psutil.Process, now: float, seconds: float) -> float:
    """The cores that the server takes while one page follows the log for so many seconds."""
    over = threading.Event()

    def follow() -> None:
        with suppress(httpx.HTTPError), httpx.stream("GET", f"{url}api/stream", timeout=120) as response:
            for _ in response.iter_lines():
                if over.is_set():
                    return

    page = threading.Thread(target=follow, daemon=True)
    page.start()
    time.sleep(5.0)  # it has got the whole by then
    used, began, step = sum(server.cpu_times()[:2]), time.monotonic(), 0
    with log.open("a", buffering=1) as file:
        while time.monotonic() - began < seconds:
            step += 1
            trial = f"late_{step:05d}"
            if step % (RESULTS // ARRIVALS) == 0:
                more = {"group": "all", "kind": "elastic", "iterations": 9}
                file.write(line(now + step / RESULTS, "trial_added", trial=trial, **more))
                taken = {"devices": [step % DEVICES], "share": 1.0, "resumed": False}
                file.write(line(now + step / RESULTS, "trial_started", trial=trial, **taken))
            measured = {"iteration": 9, "seconds": 2.5, "width": 1.0, "metric": 0.1}
            file.write(line(now + step / RESULTS, "trial_result", trial=f"train_4f2e1_{step % 64:05d}", **measured))
            time.sleep(1 / RESULTS)
    cores = (sum(server.cpu_times()[:2]) - used) / (time.monotonic() - began)
    over.set()
    return cores


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--trials", type=int, default=None, help="trials of the log (10,000; 1,000 with --quick)")
    made.add_argument("--browser", default=None, help="the program of a Chromium")
    args = made.parse_args()
    trials = args.trials or (1000 if args.quick else 10_000)
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
        log = Path(directory, EVENT_LOG_NAME)
        now = write_log(log, trials)
        say(f"a log of {log.stat().st_size / 1e6:.0f} MB, {trials} trials")
        figures: dict[str, float] = {"megabytes": log.stat().st_size / 1e6}
        began = time.monotonic()
        command = [sys.executable, "-m", "fluidtune", "view", directory]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            figures["url"] = time.monotonic() - began
            if args.browser:
                figures |= painted(url, args.browser, log, now)
            else:
                figures |= opened(url, time.monotonic())
            process = psutil.Process(server.pid)
            figures["mib"] = process.memory_info().rss / (1 << 20)
            figures["cores"] = followed(url, log, process, now, 10.0 if args.quick else 60.0)
        finally:
            server.kill()
            server.wait()
    finish(result("view_large", f"emulated:{DEVICES}", "recorded", trials=trials, **figures), args.json)


if __name__ == "__main__":
    main()

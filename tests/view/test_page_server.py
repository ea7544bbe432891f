"""The page over HTTP: a real process, asked as a browser asks."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fluidtune.steering.json_values import LONGEST
from fluidtune.view.page_server import HEADERS, page_app
from fluidtune.view.run_list import RunList
from tests.report.makers import added, over, written
from tests.report.test_summary import by_hand
from tests.steering.test_steering_files import driver
from tests.view.pages import lines_of


def ask(
    path: Path | RunList, method: str, *wanted: str, host: str = "http://127.0.0.1", token: str = "", **sent: Any
) -> list[httpx.Response]:
    """The answers of the application, in this process. ``token``: of `view --steer`; ``sent``: with each request."""
    runs = path if isinstance(path, RunList) else RunList(path)

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(page_app(runs, token))
        async with httpx.AsyncClient(transport=transport, base_url=host) as client:
            return [await client.request(method, each, **sent) for each in wanted]

    return asyncio.run(answers())


def test_the_page_and_what_it_may_load(tmp_path: Path) -> None:
    written(tmp_path / "run", by_hand())
    (page,) = ask(tmp_path / "run", "GET", "/")
    names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(names) == 5
    for name, found in zip(names, ask(tmp_path / "run", "GET", *(f"/{name}" for name in names)), strict=True):
        assert found.status_code == 200, name
        assert not re.search(r"(?:src|href|import|fetch)\W{1,3}(?:https?:)?//", found.text), name
    # What the policy would not let run.
    assert "<style" not in page.text and " style=" not in page.text and "<script>" not in page.text
    keys, runs, curve = ask(tmp_path / "run", "GET", "/api/keys", "/api/runs", "/api/curve?trial=c")
    assert (keys.json(), runs.json()[0]["best"], curve.json()["metric"]) == (["run"], ["c", 0.5], [0.7, 0.6, 0.5])
    assert ask(tmp_path / "run", "GET", "/static/..%2fpage_server.py")[0].status_code == 404
    assert ask(tmp_path / "run", "POST", "/")[0].status_code == 405


@pytest.mark.parametrize("path", ["/api/curve?trial=x", "/api/story?trial=x", "/api/curve?run=x&trial=c"])
def test_what_is_not_there_is_said(path: str, tmp_path: Path) -> None:
    written(tmp_path / "run", by_hand())
    found, stream = ask(tmp_path / "run", "GET", path, "/api/stream?run=y")
    assert found.status_code == 404 and "no such trial" in found.json()["trouble"]
    assert stream.status_code == 404 and "no such run" in stream.json()["trouble"]


@pytest.mark.parametrize(
    "path", ["/api/keys", "/api/runs", "/api/curve?trial=c", "/api/story?trial=c", "/api/stream?run=y", "/api/steer"]
)
def test_a_storage_that_is_slow_stops_no_stream(path: str, tmp_path: Path) -> None:
    """The directory is looked through by no thread that streams wait for. Seen: every page's stream stopped."""

    class Watched(RunList):
        def logs(self) -> dict[str, Path]:
            threads.add(threading.get_ident())
            return super().logs()

    threads: set[int] = set()
    runs = Watched(written(tmp_path / "run", by_hand()).parent)
    threads.clear()
    method, headers = "POST" if "steer" in path else "GET", {"X-FluidTune-Token": "secret"}
    ask(runs, method, path, token="secret", json=ACT, headers=headers)
    assert threads and threading.get_ident() not in threads


ACT: dict[str, Any] = {"id": "1", "run": "run", "trial": "c", "kind": "clone", "parameters": ["lr=0.5"]}


@pytest.mark.parametrize(
    ("token", "shown", "change", "status", "trouble"),
    [
        ("", "", {}, 403, "open `fluidtune view --steer`"),
        ("secret", "", {}, 403, "open the address that `fluidtune view --steer` has printed"),
        ("secret", "secreT", {}, 403, "may only show"),
        ("secret", "secret", {"run": "other"}, 404, "no such run"),
        ("secret", "secret", {"parameters": ["lr=a"]}, 200, "no NAME=VALUE"),
        ("secret", "secret", {"kind": "burn"}, 400, "this is no act"),
        ("secret", "secret", {"run": ["run"]}, 400, "no object with the key of a run"),
        ("secret", "secret", {"parameters": 5}, 400, "no list of texts"),
        ("secret", "secret", {"parameters": "lr=1"}, 400, "no list of texts"),
        ("secret", "secret", {"parameters": [["x"]]}, 400, "no list of texts"),
        ("secret", "secret", {"parameters": ["x" * LONGEST]}, 400, f"more than {LONGEST} bytes"),
        ("secret", "secret", {"deep": json.loads("[" * 500 + "]" * 500)}, 400, "nested deeper"),
        ("secret", "secret", {}, 200, "the run has ended"),
        ("secret", "secret http://127.0.0.1", {}, 200, "the run has ended"),
        ("secret", "secret http://127.0.0.1:81", {}, 403, "another address"),
        ("secret", "secret http://evil", {}, 403, "another address"),
        ("secret", "secret null", {}, 403, "another address"),
    ],
)
def test_only_who_has_the_token_may_steer_and_is_told_why_not(
    token: str, shown: str, change: dict[str, Any], status: int, trouble: str, tmp_path: Path
) -> None:
    written(tmp_path / "run", by_hand())
    headers = dict(zip(("X-FluidTune-Token", "Origin"), shown.split(" "), strict=False))
    (answer,) = ask(tmp_path / "run", "POST", "/api/steer", token=token, json={**ACT, **change}, headers=headers)
    assert answer.status_code == status and trouble in answer.json()["trouble"]
    (read,) = ask(tmp_path / "run", "GET", "/api/steer", token=token, headers=headers)
    assert read.status_code == 405


def test_a_run_that_was_deleted_cannot_be_steered(tmp_path: Path) -> None:
    """The page still shows it. Seen: the answer had status 500."""
    runs = RunList(written(tmp_path / "run", by_hand()).parent.parent)
    (curve,) = ask(runs, "GET", "/api/curve?run=run&trial=c")
    shutil.rmtree(tmp_path / "run")
    headers = {"X-FluidTune-Token": "secret"}
    (answer,) = ask(runs, "POST", "/api/steer", token="secret", json=ACT, headers=headers)
    assert answer.status_code == 404 and "no such run" in answer.json()["trouble"]
    assert ask(runs, "GET", "/api/curve?run=run&trial=c")[0].json() == curve.json()


def test_an_act_of_the_page_comes_to_the_driver(tmp_path: Path) -> None:
    written(tmp_path / "run", by_hand())
    with driver(tmp_path / "run", "as you wish") as heard:
        headers = {"X-FluidTune-Token": "secret"}
        (answer,) = ask(tmp_path / "run", "POST", "/api/steer", token="secret", json=ACT, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"said": "as you wish"})
    assert (heard[0].id, heard[0].via, heard[0].parameters) == ("1", "page", {"lr": 0.5})


def events_of(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """The server-sent events: id and data."""
    last = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            last = line[4:]
        elif line.startswith("data: "):
            yield last, json.loads(line[6:])


@pytest.mark.slow
@pytest.mark.core
def test_a_run_is_followed_and_a_break_is_made_up_for(tmp_path: Path) -> None:
    log = written(tmp_path / "run", by_hand()[:5])
    command = [sys.executable, "-m", "fluidtune", "view", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = re.match(r"(http://127\.0\.0\.1:\d+/) shows 1 run", server.stdout.readline())[1]  # type: ignore[index]
        with httpx.Client(base_url=url, timeout=60) as client:
            with client.stream("GET", "/api/stream") as response:
                events = events_of(response)
                assert response.headers["content-security-policy"].startswith("default-src 'self'")
                cursor, first = next(events)
                assert first["whole"] and len(first["trials"]) == 3
                assert abs(first["clock"] - time.time()) < 60  # once with each stream
                with log.open("ab") as file:
                    file.write(lines_of(by_hand()[5:10]))
                cursor, second = next(events)
                assert not second["whole"] and "clock" not in second
                assert [row[2] for row in second["trials"]] == ["c", "b", "a"]
            with log.open("ab") as file:  # while the browser sleeps
                file.write(lines_of([added(108, "late"), over(120)]))
            with client.stream("GET", "/api/stream", headers={"Last-Event-ID": cursor}) as response:
                _, third = next(events_of(response))
                assert not third["whole"] and [row[2] for row in third["trials"]] == ["late"] and third["over"]
            static = "/" + re.findall(r'src="([^"]+)"', client.get("/").text)[0]
            for path, status in {"/": 200, static: 200, "/api/keys": 200, "/api/curve": 404, "/no": 404}.items():
                answers = [(client.get(path), status), (client.get(path, headers={"Host": "elsewhere"}), 400)]
                for answer, expected in answers:
                    assert answer.status_code == expected, path
                    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
            assert client.get("/api/keys", headers={"Host": "localhost:8123"}).status_code == 200
            story = client.get("/api/story", params={"trial": "late"}).json()
            assert story["told"][0][2].startswith("added to group g")
        busy = subprocess.run([*command, "--port", url.split(":")[2].strip("/")], capture_output=True, text=True)
        assert busy.returncode == 2 and "give another --port" in busy.stderr and busy.stderr.count("\n") == 1
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()

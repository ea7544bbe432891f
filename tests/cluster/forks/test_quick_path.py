"""The quick path of a start, from Ray's order on: what becomes of it whatever dies at each step, and of each context.

A launcher is started as on a quick node, and pauses before it says that the process may run.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fluidtune.cluster.forks import fork_launcher
from tests.contracts.processes import until

pytestmark = [pytest.mark.slow, pytest.mark.core]

#: Holds a server.
HOLDER = """
import os, time
from fluidtune.cluster.forks.fork_server import ForkServer
server = ForkServer(["json"], dict(os.environ))
state = server.finish([], {})
print(state.pid, state.command, flush=True)
time.sleep(100)
"""
#: What Ray starts on a quick node. It pauses where its environment says so.
LAUNCHER = f"""
import os, sys
sys.path.append({os.path.dirname(fork_launcher.__file__)!r})
import fork_launcher
pauses, write = "PAUSES" in os.environ, os.write
def wait(file, data):
    if data == b"!" and pauses:
        write(1, b"answered\\n")
        os.read(0, 1)
    return write(file, data)
os.write = wait
fork_launcher.main(RAYS)
"""
#: Stands for Ray's own program: it starts PROGRAM by this Python, whatever the context says.
RAYS = """
import os, sys
program = [each for each in sys.argv[1:] if each[:2] != "--"]
os.execv(sys.executable, [sys.executable, *program])
"""
#: Says whether it is a fork, and waits.
PROGRAM = """
import os, sys
forked = "fluidtune.cluster.forks.child" in sys.modules
with open(sys.argv[1], "a") as file:
    print("forked" if forked else "plain", os.getcwd(), file=file)
os.read(0, 1)
"""


class Start:
    """A holder with its server, and launchers that ask it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, folder / "lines"
        for name, text in {"rays.py": RAYS, "program.py": PROGRAM}.items():
            (folder / name).write_text(text)
        (folder / "launcher.py").write_text(LAUNCHER.replace("RAYS", repr(str(folder / "rays.py"))))
        self.lines.touch()
        own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        self.holder = subprocess.Popen([sys.executable, "-c", HOLDER], env=own, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None
        pid, self.command = self.holder.stdout.readline().strip().split(" ", 1)
        self.server, self._own, self._launchers = psutil.Process(int(pid)), own, list[subprocess.Popen[bytes]]()

    def launch(self, pauses: bool = False, program: str = "program.py", **context: Any) -> subprocess.Popen[bytes]:
        said = fork_launcher.CONTEXT + json.dumps({"env_vars": {}, "py_executable": self.command, **context})
        words = [sys.executable, str(self.folder / "launcher.py"), said, "--language=PYTHON"]
        words += [*shlex.split(program), str(self.lines)]
        made = subprocess.Popen(
            words,
            env={**self._own, "PAUSES": "yes"} if pauses else self._own,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._launchers.append(made)
        return made

    def ran(self) -> list[str]:
        return [line.split()[0] for line in self.lines.read_text().splitlines()]

    def close(self) -> None:
        for each in (*self._launchers, self.holder):
            each.kill()
            each.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made = Start(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("step", "killed", "runs", "status"),
    [
        ("asking", "launcher", [], {-9}),
        ("asking", "server", ["plain"], {0}),
        ("asking", "holder", ["plain", "forked"], {0}),
        ("answered", "launcher", [], {-9}),
        ("answered", "server", ["forked"], {0}),
        ("answered", "holder", ["forked"], {0}),
        ("answered", "child", ["plain"], {0}),
        ("running", "launcher", ["forked"], {-9}),
        ("running", "server", ["forked"], {0}),
        ("running", "holder", ["forked"], {0}),
        ("running", "child", ["forked"], {128 + 9}),
    ],
)
def test_a_process_runs_once_or_not_at_all_whatever_is_killed(
    start: Start, step: str, killed: str, runs: list[str], status: set[int]
) -> None:
    beside = start.launch()  # runs, and is left alone
    assert until(lambda: start.ran() == ["forked"])
    (another,) = start.server.children()
    if step == "asking":
        start.server.suspend()
    launcher = start.launch(step == "answered")
    assert launcher.stdin is not None and launcher.stdout is not None
    child: psutil.Process | None = None
    if step == "asking":
        assert until(lambda: asks(launcher.pid))
    elif step == "answered":
        assert launcher.stdout.readline() == b"answered\n"
    else:
        assert until(lambda: len(start.ran()) == 2)
    if step != "asking":
        (child,) = {*start.server.children()} - {another}
    {"launcher": launcher, "server": start.server, "holder": start.holder, "child": child}[killed].kill()
    if killed != "server":
        start.server.resume()
    ends = {"holder": start.server, "child": child}.get(killed)
    assert ends is None or until(lambda: not alive(ends))
    with suppress(BrokenPipeError):  # it may have ended
        launcher.stdin.write(b"!!" if step == "answered" else b"!")
        launcher.stdin.flush()
    assert launcher.wait(60) in status
    assert child is None or until(lambda: not alive(child))
    if alive(start.server):
        other = start.launch()
        other.communicate(b"!")
        assert other.returncode == 0
        runs = [*runs, "forked"]
    first, *ran = start.ran()
    assert ran == runs or (len(runs) == 2 and ran in (runs[:1], runs[1:]))
    assert alive(another)
    beside.communicate(b"!")
    assert (first, beside.returncode) == ("forked", 0) and not alive(another)


def asks(pid: int) -> bool:
    """Whether a launcher is connected, and waits."""
    return psutil.Process(pid).status() == "sleeping" and any(
        "socket:" in os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")
    )


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("context", "program", "runs"),
    [
        ({}, "program.py", "forked"),
        ({"command_prefix": ["cd", "FOLDER", "&&"]}, "program.py", "forked"),  # working_dir
        ({"command_prefix": ["source", "/env/bin/activate", "1>&2", "&&"]}, "program.py", "plain"),  # pip, conda
        ({"py_executable": "/env/bin/python"}, "program.py", "plain"),  # pip, and one of the user's own
        ({"py_executable": "uv run --isolated python"}, "program.py", "plain"),
        ({"py_executable": "podman run --rm image python"}, "program.py", "plain"),
        ({"override_worker_entrypoint": "/container/worker.py"}, "program.py", "plain"),
        ({"env_vars": {"A": "${HOME}"}}, "program.py", "plain"),
        ({"java_jars": [], "of_a_later_ray": 1}, "program.py", "plain"),
        ({}, "-u program.py", "forked"),
        ({}, "-m program", "plain"),  # Ray's client server is such a one
    ],
)
def test_what_is_known_whole_is_forked_and_all_else_is_rays_own_programs(
    start: Start, context: dict[str, Any], program: str, runs: str
) -> None:
    folder = start.folder / "working"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    if "command_prefix" in context:
        context = {"command_prefix": [each.replace("FOLDER", str(folder)) for each in context["command_prefix"]]}
    launcher = start.launch(program=program, **context)
    launcher.communicate(b"!", timeout=60)
    where = folder if "cd" in context.get("command_prefix", ()) else start.folder
    assert launcher.returncode == 0 and start.lines.read_text().split() == [runs, str(where)]


def test_two_hundred_at_once_are_all_forked(start: Start) -> None:
    many = [start.launch() for _ in range(200)]
    assert until(lambda: len(start.ran()) == 200, 120)
    assert set(start.ran()) == {"forked"}
    for each in many:
        each.communicate(b"!")
    assert {each.returncode for each in many} == {0}

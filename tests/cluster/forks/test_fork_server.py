"""A real fork server with packages of the test's own: what a child sees, and what becomes of every part that dies."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fluidtune.cluster.forks.fork_server import ForkServer, ServerState, new_name
from fluidtune.cluster.forks.forked import by_server
from salus_share.seat_table import home
from tests.contracts.processes import connected, needs_root, python, until, without_descriptors
from tests.salus.processes import mps_server

pytestmark = [pytest.mark.slow, pytest.mark.core]

STANDIN = Path(__file__).parents[2] / "salus" / "standin"
#: Whether a process is a fork, without an import of FluidTune's in a plain one.
IS_FORKED = "import sys\nprint('fluidtune.cluster.forks.child' in sys.modules)"
PID = "import os\nPID = os.getpid()\n"


def test_what_the_server_has_imported_is_there_and_all_else_is_imported_by_the_process(packages, serve, tmp_path):
    served = serve(packages(lib=PID, later="import lib\n" + PID), "lib")
    program = "import os, sys\nprint('lib' in sys.modules, 'later' in sys.modules)\nimport later, lib\n"
    program += "print(lib.PID == os.getpid(), later.PID == os.getpid())"
    assert served.run(program, tmp_path).stdout.splitlines() == ["True False", "False True"]


def test_a_variable_that_a_listed_package_has_read_and_that_differs_makes_a_plain_process(packages, serve, tmp_path):
    served = serve(packages(lib=""), "numpy", OMP_NUM_THREADS="1")
    assert served.run(IS_FORKED, tmp_path, OTHER="2").stdout == "True\n"
    plain = served.run(IS_FORKED, tmp_path, OMP_NUM_THREADS="2")
    assert plain.stdout == "False\n" and "OMP_NUM_THREADS is '2' here and '1'" in plain.stderr
    # A package that the server has not imported may read what it likes.
    assert served.run(IS_FORKED, tmp_path, TORCH_LOGS="all").stdout == "True\n"


def test_such_a_variable_that_the_process_own_code_sets_asks_for_a_plain_process(packages, serve, tmp_path):
    sets = "import os\ndef at(name, value):\n    os.environ[name] = value\n"
    site = packages(lib=sets).parent / "site-packages"
    served = serve(site, "numpy", "lib", OMP_NUM_THREADS="1")
    own = "import os\nos.environ.update({'OTHER': '2', 'OMP_NUM_THREADS': '1'})\nos.environ['OMP_NUM_THREADS'] = '2'"
    assert "NeedsPlainProcess: OMP_NUM_THREADS was '1'" in served.run(own, tmp_path).stderr
    # Ray and other packages set what they would have set in a new process.
    other = "import lib, os\nlib.at('OMP_NUM_THREADS', '2')\nprint(os.environ['OMP_NUM_THREADS'])"
    assert served.run(other, tmp_path).stdout == "2\n"


def test_a_trials_number_of_threads_is_there_from_the_first_line_unless_the_user_has_set_one(serve, tmp_path):
    shows = "import os\nprint([os.environ.get(each) for each in ('OMP_NUM_THREADS', 'FLUIDTUNE_THREADS')])"
    served = serve(tmp_path, "numpy")
    served.environment.pop("OMP_NUM_THREADS", None)
    for command in (
        served.command,
        [*served.command[:-1], "@fluidtune-forks-0"],
    ):  # forked; and plain, as there is none
        served.command = command
        for users, found in (({}, "4"), ({"OMP_NUM_THREADS": "2"}, "2")):
            said = served.run(shows, tmp_path, FLUIDTUNE_THREADS="4", **users)
            assert said.stdout == f"['{found}', None]\n", said.stderr


def test_what_imports_have_set_in_the_environment_is_set(packages, serve, tmp_path):
    served = serve(packages(lib="import os\nos.environ['A_VALUE'] = 'set'\n"), "lib")
    program = "import os\nprint(os.environ['A_VALUE'])"
    assert served.run(program, tmp_path).stdout == "set\n"
    assert served.run(program, tmp_path, A_VALUE="given").stdout == "given\n"


def test_a_package_of_that_name_in_the_users_folder_is_taken(packages, serve, tmp_path):
    served = serve(packages(lib="WHOSE = 'installed'\n"), "lib")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "lib.py").write_text("WHOSE = 'mine'\n")
    search = f"{mine}:{served.environment['PYTHONPATH']}"
    found = served.run("import lib\nprint(lib.WHOSE)", tmp_path, PYTHONPATH=search)
    assert found.stdout == "mine\n" and "has another lib" in found.stderr


@pytest.mark.parametrize(
    "does, why",
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n",
            "has started a thread",
        ),
        ("import subprocess\nCHILD = subprocess.Popen(['sleep', '1'])\n", "has started a process"),
        ("import os\nprint('its last words', flush=True)\nos._exit(1)\n", "its last words"),
        ("import os\nos.write(3, b'half a line\\n')\n", "it ended"),  # where the server speaks
    ],
)
def test_there_is_no_server_after_an_import_that_ends_it_or_starts_what_forks_lack(packages, does, why):
    search = f"{packages(bad=does)}{os.pathsep}{Path(__file__).parents[3]}"
    state = ForkServer(["bad"], {**os.environ, "PYTHONPATH": search}).finish([], {})
    assert state.command is None and why in (state.why or "")


@pytest.mark.parametrize("moment", ["before", "as it is started", "while it begins", "after"])
def test_a_server_that_is_stopped_while_it_begins_does_not_begin_again(monkeypatch, moment):
    """Seen: its thread ended with an assertion where the node's own server was quicker."""
    server, start = ForkServer([], dict(os.environ)), subprocess.Popen.__init__
    if moment == "as it is started":
        monkeypatch.setattr(subprocess.Popen, "__init__", lambda *args, **how: (server.stop(), start(*args, **how))[1])
    if moment == "while it begins":
        monkeypatch.setattr(subprocess.Popen, "wait", lambda _: server.stop())
    if moment == "before":
        server.stop()
    server.begin()
    if moment == "after":
        server.stop()
    assert server.wait() == "the fork server has ended"
    assert server.finish([], {}) == ServerState(None, "it was stopped")


def test_random_streams_identifiers_and_temporary_names_differ_and_what_is_seeded_is_equal(packages, serve, tmp_path):
    served = serve(packages(lib=""), "lib", "numpy", "numpy.random", "torch")
    program = """
import multiprocessing, random, secrets, tempfile, uuid, numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(1).item(), numpy.random.default_rng().random())
print(uuid.uuid4(), tempfile.mktemp(), secrets.token_hex(), multiprocessing.current_process().authkey.hex())
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
print("seeded", random.random(), numpy.random.rand(), torch.rand(1).item())
"""
    runs = [served.run(program, tmp_path).stdout.splitlines() for _ in range(3)]
    plain = python("-c", program, **served.environment).splitlines()
    drawn = [word for lines in (*runs, plain) for line in lines[:2] for word in line.split()]
    assert len(drawn) == 4 * 8 and len(set(drawn)) == len(drawn)
    assert {lines[2] for lines in (*runs, plain)} == {plain[2]}


def test_ids_of_ray_differ_between_forks_whose_server_has_imported_actors(packages, serve, tmp_path):
    # Seen: one trial got the object that another had put.
    actors = "import ray\n@ray.remote\nclass Actor:\n    pass\n"
    served = serve(packages(lib=actors), "ray", "ray.data", "lib")
    program = """
import threading, ray, ray.data, lib
drawn = [ray.ObjectRef.from_random()]
for _ in range(2):
    thread = threading.Thread(target=lambda: drawn.append(ray.ObjectRef.from_random()))
    thread.start(), thread.join()
print(ray.data.__name__, *(each.hex() for each in drawn))
"""
    runs = [served.run(program, tmp_path).stdout.split() for _ in range(3)]
    assert [len(run) for run in runs] == [4] * 3 and len({each for run in runs for each in run[1:]}) == 9


@pytest.mark.parametrize("text", ["1 / 0", "import not_there", "import sys\nsys.exit(3)"])
def test_a_package_that_cannot_be_imported_fails_in_the_child_as_in_a_plain_process(packages, serve, tmp_path, text):
    served = serve(packages(lib="", bad=text), "lib", "bad")
    assert list(served.state.failed) == ["bad"]
    program = "try:\n    import bad\nexcept BaseException as error:\n    print(type(error).__name__, error)"
    assert served.run(program, tmp_path).stdout == python("-c", program, **served.environment)


def test_a_server_takes_the_place_of_the_one_of_its_name_when_that_ends(packages, serve, tmp_path):
    """Seen: a client of Ray that connected again had no server, as that of its first connection was still ending."""
    first = serve(packages(lib=""), "lib")
    later = ForkServer(["lib"], first.environment, first.command[-1])
    assert later.finish([], {}).why is None
    first.server.stop()
    assert until(lambda: first.run(IS_FORKED, tmp_path).stdout == "True\n", 10)
    later.stop()


def test_a_command_for_all_nodes_finds_this_python_where_no_server_is():
    # Seen: where this Python is not the first on `PATH`, the first process waited for 60 s.
    command = shlex.split(by_server(new_name())["py_executable"])
    says = [*command, "-c", "import sys; print(sys.executable)"]
    done = subprocess.run(says, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == sys.executable, done.stderr


def address(served) -> str:
    """Where the server listens."""
    return f"\0{served.command[-1][1:]}"


#: A user id that is nobody's here.
NOBODY = 65534


def as_nobody(does) -> tuple[int, int]:
    """Call ``does(pipe)`` in a fork of this process that is another user's. Its id, and the other end of the pipe."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            does(write)
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.close(write)
    return pid, read


@needs_root
def test_another_user_does_not_reach_a_server(packages, serve, tmp_path):
    served = serve(packages(lib=""), "lib")

    def connects(pipe: int) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address(served))
            connection.sendall(b"?")
            os.write(pipe, b"heard " + connection.recv(1000))

    pid, pipe = as_nobody(connects)
    said = os.read(pipe, 1000).decode()
    os.waitpid(pid, 0)
    os.close(pipe)
    assert said in ("heard ", "ConnectionResetError", "BrokenPipeError")
    assert served.run("print(1)", tmp_path).stdout == "1\n"


@needs_root
def test_a_launcher_says_nothing_to_another_users_server(packages, serve, tmp_path):
    served = serve(packages(lib=""), "lib")
    served.server.stop()

    def listens(pipe: int) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address(served))
            listener.listen()
            os.write(pipe, b"listens")
            os.write(pipe, b"heard " + listener.accept()[0].recv(1000))

    pid, pipe = as_nobody(listens)
    assert os.read(pipe, 7) == b"listens"
    done = served.run("print(1)", tmp_path)
    assert done.stdout == "1\n" and f"is user {NOBODY}'s" in done.stderr
    assert os.read(pipe, 1000) == b"heard "
    os.waitpid(pid, 0)
    os.close(pipe)


def test_a_full_disk_or_no_place_for_temporary_files_is_none_of_a_servers_concern(packages, tmp_path):
    """No byte can be written to a file: so a full disk looks to a process."""
    folder = packages(lib="", later="")
    search = f"{folder}{os.pathsep}{Path(__file__).parents[3]}"
    (tmp_path / "program.py").write_text("import lib, later, os\nos.write(1, b'there')\n")
    program = f"""
import os, resource, shlex, subprocess, sys
from fluidtune.cluster.forks.fork_server import ForkServer
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
environment = {{**os.environ, "TMPDIR": "/not/there", "PYTHONPATH": {search!r}}}
server = ForkServer(["lib"], environment)
state = server.finish([], {{}})
command = [*shlex.split(state.command), {str(tmp_path / "program.py")!r}]
os.write(1, subprocess.run(command, env=environment, stdout=subprocess.PIPE).stdout)
server.stop()
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "there")


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


#: Says its process' id, and waits.
WAITS = "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n"


def score_of(pid: int | str) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()


def test_when_memory_is_full_the_kernel_kills_the_process_and_not_its_launcher(packages, serve, tmp_path):
    served = serve(packages(lib=""), "lib")
    mine = score_of("self")
    Path("/proc/self/oom_score_adj").write_text("500")  # as Ray does for its workers
    try:
        launcher, pid = started(served, tmp_path)
    finally:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(mine)
    assert (score_of(pid), score_of(launcher.pid)) == ("500", "0")
    launcher.kill()
    launcher.wait()
    assert until(lambda: not running(pid))


def started(served, tmp_path: Path, first: str = "") -> tuple[subprocess.Popen[str], int]:
    """A launcher, and the process that was forked for it. ``first``: what that does before it says its id."""
    path = tmp_path / "waits.py"
    path.write_text(first + WAITS)
    launcher = subprocess.Popen(
        [*served.command, str(path)], env=served.environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert launcher.stdout is not None
    return launcher, int(launcher.stdout.readline())


def test_a_launcher_that_is_asked_to_end_asks_its_process(packages, serve, tmp_path):
    served = serve(packages(lib=""), "lib")
    launcher, pid = started(served, tmp_path)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM and until(lambda: not running(pid))


def test_a_client_of_mps_is_ended_under_its_daemon_before_the_server_kills_it(packages, serve, tmp_path):
    # Found by reading: by NVIDIA's manual, killing a client that computes may hang the other trials of its GPU.
    gpu = f"GPU-{os.getpid()}"
    (tmp_path / "calls").touch()
    with mps_server(tmp_path) as mps:
        played = {"MPS_STANDIN_LOG": str(tmp_path / "calls"), "MPS_STANDIN_SERVER": str(mps)}
        played["PATH"] = f"{STANDIN}{os.pathsep}{os.environ['PATH']}"
        folder = packages(lib="")
        served = serve(folder, "lib", **played, PYTHONPATH=f"{folder}{os.pathsep}{STANDIN.parents[2]}")
        client = "from salus_share.mps import Mps\nfrom salus_share.seat_table import home\n"
        client += f"assert Mps({gpu!r}, home('mps-{gpu}')).acquire()\n"
        try:
            launcher, pid = started(served, tmp_path, client)
            launcher.kill()
            assert until(lambda: not running(pid))
            launcher.wait()
        finally:
            shutil.rmtree(home(f"mps-{gpu}"), ignore_errors=True)
    assert (tmp_path / "calls.ended").read_text() == f"{pid} True\n"


#: A package in a server that cannot fork while there is a file; it says so as a machine without room for a process.
FULL = """
import os
fork = os.fork
def failing():
    if os.path.exists({path!r}):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = failing
"""


def test_a_server_that_cannot_fork_for_a_while_says_why_kills_what_is_to_end_and_forks_again(packages, serve, tmp_path):
    path = tmp_path / "full"
    served = serve(packages(lib=FULL.format(path=str(path))), "lib")
    launcher, pid = started(served, tmp_path)
    path.touch()
    plain = served.run(IS_FORKED, tmp_path)
    assert plain.stdout == "False\n" and "temporarily unavailable" in plain.stderr
    launcher.kill()
    launcher.wait()
    assert until(lambda: not running(pid))
    path.unlink()
    assert served.run(IS_FORKED, tmp_path).stdout == "True\n"


def test_a_server_without_descriptors_sleeps_and_forks_again_later(packages, serve, tmp_path):
    served = serve(packages(lib=""), "lib")
    assert served.run(IS_FORKED, tmp_path).stdout == "True\n"
    with without_descriptors(served.state.pid, lambda: connected(address(served))):
        assert served.run(IS_FORKED, tmp_path).stdout == "True\n"

"""What packages make at their import that each process must have alone, and what no fork may share with another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.forks.conftest import plainly

pytestmark = pytest.mark.slow

#: As Weights & Biases does, for media and for artifacts.
FOLDERS = """
import tempfile
MEDIA = tempfile.TemporaryDirectory("media")
class Artifact:
    FOLDER = tempfile.TemporaryDirectory(prefix="artifacts")
with tempfile.TemporaryDirectory() as TRIED:
    pass
"""


@pytest.mark.core
def test_a_temporary_folder_of_a_package_is_the_process_own_and_there(packages, serve, tmp_path):
    # docs/bugs.md, 440: the first process that ended removed it for all.
    (tmp_path / "tmp").mkdir()
    served = serve(
        packages(lib="import os\nfrom lib import part\n", lib__part=FOLDERS), "lib", TMPDIR=str(tmp_path / "tmp")
    )
    program = """
import os, lib.part
for each in (lib.part.MEDIA.name, lib.part.Artifact.FOLDER.name):
    print(os.path.basename(each), os.path.isdir(each))
print(os.path.exists(lib.part.TRIED))
"""
    runs = [served.run(program, tmp_path).stdout.split() for _ in range(3)]
    plain = plainly(program, tmp_path, served.environment).split()
    assert [run[1::2] for run in runs] == [["True", "True"]] * 3 == [plain[1::2]] * 3 and plain[4] == "False"
    assert len({each for run in (*runs, plain) for each in run[:4:2]}) == 8
    assert served.state.left_out == {}
    assert not [each for each in os.listdir(tmp_path / "tmp") if "media" in each or "artifacts" in each]
    idle = served.run("import os\nprint(len(os.listdir(os.environ['TMPDIR'])))", tmp_path).stdout
    assert idle == f"{len(os.listdir(tmp_path / 'tmp'))}\n"  # who does not import it makes none


def test_temporary_files_are_made_where_the_process_own_environment_says(packages, serve, tmp_path):
    # docs/bugs.md, 445: a package that asked for the place at its import had decided it for all processes.
    served = serve(packages(lib="import tempfile\ntempfile.gettempdir()\n"), "lib")
    (tmp_path / "other").mkdir()
    found = served.run("import tempfile\nprint(tempfile.gettempdir())", tmp_path, TMPDIR=str(tmp_path / "other"))
    assert found.stdout.strip() == str(tmp_path / "other")


@pytest.mark.core
@pytest.mark.parametrize("imported", ["cached", "asks, cached", "cached, asks"])
def test_what_a_function_remembers_of_the_environment_is_of_the_process_own(packages, serve, tmp_path, imported):
    # docs/bugs.md, 445: the import of one package had another remember the server's value.
    cached = "import functools, os\n@functools.cache\ndef place():\n    return os.environ.get('A_PLACE', 'none')\n"
    served = serve(packages(cached=cached, asks="import cached\ncached.place()\n", other=""), "cached", "asks", "other")
    program = f"import {imported}, other\nimport os\nprint(cached.place(), 'asks' in dir())\n"
    program += "print(any('shelf' in type(f).__module__ for f in __import__('sys').meta_path))"
    for place in ("none", "here"):
        value = {} if place == "none" else {"A_PLACE": place}
        there = f"{place} {'asks' in imported}\nTrue\n"
        assert served.run(program, tmp_path, **value).stdout == there


#: A package each, and what is said of it.
SHARED = {
    "a temporary file": ("import tempfile\nFILE, PATH = tempfile.mkstemp()\nimport os\nos.close(FILE)\n", "has made /"),
    "a temporary folder": ("from tempfile import mkdtemp\nPATH = mkdtemp()\n", "has made /"),
    "a file": ("import os\nFILE = open(os.path.join(os.path.dirname(__file__), 'log'), 'w')\n", "/log"),
    "a connection": ("import socket\nPAIR = socket.socketpair()\n", "socket:"),
    "an event loop": ("import asyncio\nLOOP = asyncio.new_event_loop()\n", "has opened"),
    "a database": (
        "import sqlite3\nDB = sqlite3.connect(__file__ + '.db')\nDB.execute('create table if not exists a(b)')\n",
        ".db",
    ),
    "a lock of all processes": ("import multiprocessing\nLOCK = multiprocessing.Lock()\n", "memory"),
    "shared memory": ("import mmap\nMEMORY = mmap.mmap(-1, 4096)\n", "memory"),
    "a process": (
        "import subprocess\nCHILD = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n",
        "has started a process",
    ),
    "a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n",
        "has started a thread",
    ),
    "a thread of no Python": (
        "import ctypes\nC = ctypes.CDLL(None)\nT = ctypes.c_ulong()\n"
        "C.pthread_create(ctypes.byref(T), None, C.pause, None)\n",
        "has started a thread",
    ),
    "a handler that fails": ("import os\nos.register_at_fork(after_in_child=lambda: 1 / 0)\n", "ZeroDivisionError"),
    "a folder that has something in it": (
        "import os, tempfile\nFOLDER = tempfile.TemporaryDirectory()\nos.mkdir(FOLDER.name + '/a')\n",
        "has made /",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("what", SHARED)
def test_a_package_that_has_what_forks_would_share_or_lack_is_left_out_and_named(packages, serve, tmp_path, what):
    # docs/bugs.md, 440 to 442
    text, said = SHARED[what]
    folder = packages(lib=text, other="import os\nPID = os.getpid()\n")
    served = serve(folder, "other", "lib", TMPDIR=str(tmp_path))
    assert list(served.state.left_out) == ["lib"] and said in served.state.left_out["lib"]
    found = served.run("import os, other\nprint(other.PID == os.getpid())\nimport lib", tmp_path)
    assert (found.stdout, found.returncode) == ("False\n", 0)
    if "temporary" in what:
        served.server.stop()
        assert not [each for each in Path(tmp_path).glob("tmp*")][1:]  # the program's own one, at most


@pytest.mark.parametrize("when", ["before", "after_in_child"])
def test_a_package_whose_handler_holds_forks_up_is_left_out_and_named(packages, serve, tmp_path, when):
    # docs/bugs.md, 442: each start waited for the launcher's patience, or its process did not begin at all.
    text = f"import os, threading\nLOCK = threading.Lock()\nLOCK.acquire()\nos.register_at_fork({when}=LOCK.acquire)\n"
    served = serve(packages(lib=text, other=""), "other", "lib")
    assert list(served.state.left_out) == ["lib"] and "cannot be forked" in served.state.left_out["lib"]
    assert served.run("import other\nprint(1)", tmp_path).stdout == "1\n"


def test_what_packages_only_read_or_have_closed_leaves_none_of_them_out(packages, serve, tmp_path):
    texts = {
        "reads": "import os\nwith open(__file__) as f:\n    f.read()\nZERO = open('/dev/null')\n",
        "waits": "import subprocess, threading\nsubprocess.run(['true'])\nT = threading.Thread(target=int)\n"
        "T.start(), T.join()\n",
        "forks": "import os\nos.register_at_fork(before=lambda: None, after_in_child=lambda: None)\n",
        "tries": "import os, tempfile\nwith tempfile.NamedTemporaryFile() as f:\n    pass\n"
        "os.rmdir(tempfile.mkdtemp())\n",
    }
    served = serve(packages(**texts), *texts, "numpy", "pyarrow", "torch")
    assert (served.state.left_out, served.state.failed) == ({}, {})


@pytest.mark.core
def test_generators_that_are_spawned_from_a_packages_own_differ(packages, serve, tmp_path):
    # docs/bugs.md, 443
    lib = """
import numpy
OWN, SEED = numpy.random.default_rng(), numpy.random.SeedSequence()
OF_SEED = numpy.random.default_rng(SEED)
SEEDED = numpy.random.default_rng(7), numpy.random.SeedSequence(8)
"""
    served = serve(packages(lib=lib), "lib", "numpy", "numpy.random")
    program = """
import lib, numpy
def first(seed):
    return numpy.random.default_rng(seed.spawn(1)[0]).random()
print(lib.OWN.spawn(1)[0].random(), first(lib.SEED), lib.SEED.generate_state(1)[0], lib.OF_SEED.random())
print(lib.SEED.entropy)
print("seeded", lib.SEEDED[0].spawn(1)[0].random(), first(lib.SEEDED[1]))
"""
    runs = [served.run(program, tmp_path).stdout.splitlines() for _ in range(3)]
    plain = plainly(program, tmp_path, served.environment).splitlines()
    drawn = [word for lines in (*runs, plain) for line in lines[:2] for word in line.split()]
    assert len(drawn) == 20 and len(set(drawn)) == len(drawn)
    assert {lines[2] for lines in (*runs, plain)} == {plain[2]}


@pytest.mark.core
def test_identifiers_that_packages_draw_at_their_import_differ_and_what_is_also_elsewhere_stays(
    packages, serve, tmp_path
):
    # docs/bugs.md, 444
    lib = """
import base64, os, secrets, uuid
from os import urandom
SESSION, RUN, SHORT = uuid.uuid4().hex, f"run-{uuid.uuid4()}", "run-" + uuid.uuid4().hex[:8]
ID, TOKEN, KEY, URL = uuid.uuid4(), secrets.token_hex(16), secrets.token_bytes(32), secrets.token_urlsafe(16)
SALT, NUMBER, TEXT = urandom(16), secrets.randbits(128), "a=" + base64.b64encode(os.urandom(12)).decode() + ";"
STAYS, PLAIN, FEW = uuid.uuid4().hex, "0123456789", os.urandom(2)
TABLE = {STAYS: 1}
"""
    # What it has put into another module is the same there.
    served = serve(packages(lib=lib, user="from lib import SESSION\n"), "lib", "user")
    program = """
import os, lib, user
names = "SESSION RUN SHORT ID TOKEN KEY URL SALT NUMBER TEXT".split()
print(*(str(getattr(lib, name)).replace(" ", "") for name in names))
print([len(str(getattr(lib, name))) for name in names if name not in ("KEY", "SALT", "NUMBER")])
print([type(getattr(lib, name)).__name__ for name in names])
print(lib.RUN[:4], lib.SHORT[:4], lib.ID.version, len(lib.KEY), lib.TEXT[::18], lib.PLAIN, user.SESSION == lib.SESSION,
      lib.TABLE[lib.STAYS], lib.urandom is os.urandom)
"""
    runs = [served.run(program, tmp_path).stdout.splitlines() for _ in range(3)]
    plain = plainly(program, tmp_path, served.environment).splitlines()
    drawn = [word for lines in (*runs, plain) for word in lines[0].split()]
    assert len(drawn) == 40 and {word for word in drawn if drawn.count(word) > 1} == set()
    assert {tuple(lines[1:]) for lines in (*runs, plain)} == {tuple(plain[1:])}


#: The recipe of Python's documentation.
LAZILY = """
import importlib.util, sys
def lazily(name):
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""


@pytest.mark.core
def test_a_module_that_is_loaded_lazily_or_by_hand_has_what_it_has_in_a_plain_process(packages, serve, tmp_path):
    # docs/bugs.md, 446
    folder = packages(
        lib="from lib import part\nVALUE = 1\ndef who():\n    return __name__, VALUE\n",
        lib__part="import os\nclass Image:\n    WHERE = os.environ.get('A_VALUE')\n",
        uses="from lib.part import Image\n",
    )
    served = serve(folder, "lib", "lib.part", "uses")
    program = (
        LAZILY
        + """
lib = lazily("lib")
print(lib.who(), lib.part.Image.__name__, sys.modules["lib"] is lib, type(lib).__name__)
import lib as again
from lib import VALUE
print(again is lib, VALUE)
import uses
part = lazily("lib.part") if len(sys.argv) > 1 else lib.part
print(part.Image is uses.Image, part.Image.WHERE)
del sys.modules["uses"]
spec = importlib.util.find_spec("uses")
by_hand = importlib.util.module_from_spec(spec)
spec.loader.exec_module(by_hand)
print(by_hand.Image is part.Image, "uses" in sys.modules)
"""
    )
    plain = plainly(program, tmp_path, served.environment)
    assert served.run(program, tmp_path).stdout == plain and plain.count("True") == 4
    other = plainly(program, tmp_path, {**served.environment, "A_VALUE": "2"})
    assert served.run(program, tmp_path, A_VALUE="2").stdout == other != plain


@pytest.mark.core
def test_what_a_package_loads_lazily_is_loaded_neither_by_the_driver_nor_by_the_server(packages, serve, tmp_path):
    # docs/bugs.md, 446
    heavy = "import os\nwith open(os.path.dirname(__file__) + '/loaded', 'a') as f:\n    f.write('x')\nVALUE = 1\n"
    folder = packages(lib=LAZILY + "heavy = lazily('heavy')\n", heavy=heavy)
    served = serve(folder, "lib")
    driver = "import sys, lib\nfrom fluidtune.cluster.forks.preload import installed_modules\n"
    driver += "print({'lib', 'heavy'} - set(installed_modules(sys.modules)))\n"
    assert plainly(driver, tmp_path, served.environment) == "set()\n"
    assert not (folder / "heavy" / "loaded").exists()
    program = "import sys\nprint('heavy' in sys.modules)\n"
    program += "import lib\nprint(lib.heavy.VALUE, sys.modules['heavy'] is lib.heavy)\n"
    assert served.run(program, tmp_path).stdout == "False\n1 True\n"
    assert (folder / "heavy" / "loaded").read_text() == "x"


@pytest.mark.core
def test_a_package_has_in_place_of_a_module_what_it_has_before_its_import(packages, serve, tmp_path):
    # docs/bugs.md, 475: TensorFlow imports `tensorflow.keras` when that is used.
    lazy = """
import importlib
class Lazy:
    def __getattr__(self, name):
        return getattr(importlib.import_module("lib.part"), name)
part = Lazy()
"""
    served = serve(packages(lib=lazy, lib__part="X = 1\n"), "lib", "lib.part")
    for program in ("import lib\nprint(type(lib.part).__name__, lib.part.X)", "import lib.part\nprint(lib.part)"):
        assert served.run(program, tmp_path).stdout == plainly(program, tmp_path, served.environment)

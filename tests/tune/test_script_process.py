"""The process of a script under `fluidtune run` is what ``python`` makes of it: each row of the tables is compared."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fluidtune import hash_seed

ROOT = Path(__file__).parents[2]
FLUIDTUNE = [sys.executable, "-m", "fluidtune", "run"]
NOT_CALLED = "ended without calling ray.tune.run"

#: What a script can find out of its process -> the expression that does.
FOUND = {
    "names": "list(given)",
    "__name__": "__name__",
    "__doc__": "__doc__",
    "__file__": "given.get('__file__')",
    "__package__": "__package__",
    "__spec__": "__spec__ and (__spec__.name, __spec__.origin, __spec__.parent)",
    "__loader__": "(getattr(__loader__, '__name__', type(__loader__).__name__), getattr(__loader__, 'path', None))",
    "__builtins__": "str(type(__builtins__))",
    "__annotations__": "given['__annotations__']",
    "__cached__": "given.get('__cached__')",
    "the module __main__": "vars(sys.modules['__main__']) is globals()",
    "modules of others": "sorted({n.partition('.')[0] for n in loaded} - sys.stdlib_module_names - OURS)",
    "sys.argv": "sys.argv",
    "sys.path": "sys.path",
    "sys.path_hooks": "len(sys.path_hooks)",
    "a module beside it": "__import__('beside').__file__ if path0 else None",
    "co_filename": "double.__code__.co_filename",
    "co_flags": "double.__code__.co_flags",
    "source": "attempt(lambda: inspect.getsource(double))",
    "os.environ": "dict(os.environ)",
    "working directory": "os.getcwd()",
    "open descriptors": "len(os.listdir('/proc/self/fd'))",
    "stdin": "sys.stdin.read()",
    "stdout": "(sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering)",
    "stderr": "(sys.stderr.encoding, sys.stderr.errors, sys.stderr.line_buffering)",
    "gc.get_threshold": "thresholds",
    "gc.isenabled": "gc.isenabled()",
    "gc.get_freeze_count": "gc.get_freeze_count()",
    "gc.callbacks": "gc.callbacks",
    "sys.flags": "tuple(sys.flags)",
    "sys.warnoptions": "(sys.warnoptions, repr(warnings.filters))",
    "-X": "sys._xoptions",
    "__debug__": "__debug__",
    "signals": "{str(n): str(signal.getsignal(n)) for n in signal.valid_signals()}",
    "blocked signals": "sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "threads": "[thread.name for thread in threading.enumerate()]",
    "hooks": "(sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__, sys.gettrace())",
    "displayhook": "sys.displayhook is sys.__displayhook__",
    "exit handlers": "handlers",
    "loggers": "(logging.root.handlers, logging.root.level, sorted(logging.root.manager.loggerDict))",
    "recursion limit": "sys.getrecursionlimit()",
    "a class by pickle": "pickle.loads(pickle.dumps(Mine)) is Mine and Mine.__module__",
    "parent": "os.getppid() == int(os.environ['PARENT'])",
}
SCRIPT = f"""# a script
given, handlers = dict(globals()), __import__("atexit")._ncallbacks()
OURS = {{"fluidtune", "salus_share"}}
import sys
loaded, path0 = list(sys.modules), sys.path[0]
import gc
thresholds = gc.get_threshold()
import inspect, json, logging, os, pickle, signal, threading, warnings

class Mine:
    pass

def double(x):
    return 2 * x

def attempt(what):
    try:
        return what()
    except Exception as error:
        return repr(error)

if __name__ == "__main__":
    print(json.dumps({{name: attempt(lambda: eval(code)) for name, code in {FOUND!r}.items()}}, default=str))
"""
#: How it is started -> the words for Python, and those after the script's name or instead of it, in the folder "at".
WAYS = {
    "relative": ([], ["script.py", "-x", "--devices", "y"]),
    "relative with a dot": ([], ["./script.py"]),
    "relative from another folder": ([], ["../at/../at/script.py"]),
    "absolute": ([], ["AT/script.py", "--help"]),
    "link": ([], ["../links/link.py", "-"]),
    "module": ([], ["-m", "package.module", "-m", "x"]),
    "package": ([], ["-m", "package", "--steer"]),
    "folder": ([], ["package", "x"]),
    "standard input": ([], ["-", "a"]),
    "options of Python": (["-O", "-X", "dev", "-W", "error::UserWarning"], ["script.py"]),
    "two dashes": ([], ["script.py", "--", "--"]),
    "settings": ([], ["script.py"]),
}
if sys.version_info >= (3, 11):
    WAYS["safe path"] = (["-P"], ["script.py"])


def run(at: Path, command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name not in (hash_seed.VARIABLE, hash_seed.OURS)}
    environment |= {"PYTHONPATH": str(ROOT), "PARENT": str(os.getpid()), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=at, env=environment, input=text, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("script") / "at"
    for folder in (at / "package", at.parent / "links"):
        folder.mkdir(parents=True)
        (folder / "beside.py").touch()
    for file in ("script.py", "package/module.py", "package/__main__.py"):
        (at / file).write_text(SCRIPT)
    (at / "beside.py").touch()
    (at / "package/__init__.py").touch()
    (at.parent / "links/link.py").symlink_to(at / "script.py")
    return at


@pytest.fixture(scope="module")
def found(at: Path) -> object:
    """What the script finds, by the way in which it is started: under Python, and under `fluidtune run`."""

    @functools.cache
    def by(way: str) -> list[dict[str, object]]:
        options, words = WAYS[way]
        words = [word.replace("AT", str(at)) for word in words]
        text = SCRIPT if words[0] == "-" else "given"
        settings = ["--devices", "cpu:2", "--no-fork-server"] if way == "settings" else []
        commands = ([sys.executable, *options], [sys.executable, *options, *FLUIDTUNE[1:], *settings])
        both = [run(at, [*command, *words], text) for command in commands]
        assert both[0].returncode == 0 and NOT_CALLED in both[1].stderr, [done.stderr for done in both]
        return [json.loads(done.stdout) for done in both]

    return by


@pytest.mark.parametrize("row", FOUND)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_script_finds_at_its_first_line(way: str, row: str, found: object) -> None:
    stock, ours = found(way)  # type: ignore[operator]
    assert ours[row] == stock[row]


#: How scripts end -> the script, and what must be in its output under Python for the row to say anything.
ENDINGS = {
    "a file left open": ("f = open('out', 'w'); f.write('hello')\ndef main(): return f", ""),
    "an object that is deleted": ("class A:\n def __del__(self): print('gone')\na = A()\na.me = a", "gone"),
    "exit handlers": ("import atexit\nfor n in '12': atexit.register(print, n, flush=True)", "2\n1"),
    "a thread that is awaited": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), print('end'))).start()",
        "end",
    ),
    "a daemon": ("import threading, time\nthreading.Thread(target=time.sleep, args=[99], daemon=True).start()", ""),
    "sys.exit(3)": ("import sys; sys.exit(3)", ""),
    "sys.exit(text)": ("import sys; sys.exit('no data')", "no data"),
    "os._exit": ("import os; print(1, flush=True); os._exit(4)", ""),
    "an exception": ("def f():\n    raise KeyError('mine')\nf()", "KeyError: 'mine'"),
    "an exception in a class of its own": ("class Mine(BaseException): pass\nraise Mine('x')", "Mine: x"),
    "a syntax error": ("x = 1\ndef f(:\n", "SyntaxError"),
    "another encoding": ("# -*- coding: latin-1 -*-\nraise ValueError('\u00e9')", "\u00c3"),
    "a hook for exceptions": (
        "import sys\nsys.excepthook = lambda *_: print('hooked', _[0])\n1 / 0",
        "hooked <",
    ),
    "the last traceback": (
        "import atexit, sys, traceback\n"
        "atexit.register(lambda: print(traceback.extract_tb(sys.last_traceback), sys.excepthook))\n1 / 0",
        "line 3",
    ),
    "a thread's exception": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()",
        "ZeroDivision",
    ),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "Ctrl-C": ("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT); time.sleep(9)", "KeyboardInterrupt"),
    "SIGTERM": ("import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", ""),
    "a warning": ("import warnings\nwarnings.warn('careful')", "careful"),
    "processes by spawn": (
        "import multiprocessing as m\ndef f(x): return __name__, x\n"
        "if __name__ == '__main__':\n with m.get_context('spawn').Pool(1) as p: print(p.map(f, [1]))",
        "[('__mp_main__', 1)]",
    ),
    "its environment in a child": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import os; print(os.environ)'],"
        " capture_output=True, text=True).stdout)",
        "environ",
    ),
    "its own name imported": ("import __main__, sys\nprint(__main__.sys is sys, __main__.__file__)", "True"),
    "an interpreter that goes on": ("import code, sys\ncode.interact(local=globals(), exitmsg='')", ">>>"),
}


@pytest.mark.parametrize("row", ENDINGS)
@pytest.mark.parametrize("way", ["file", "module"])
def test_how_a_script_ends(way: str, row: str, tmp_path: Path) -> None:
    text, said = ENDINGS[row]
    script = tmp_path / "script.py"
    script.write_text(text + "\n")
    words = ["-m", "script"] if way == "module" else ["script.py"]
    found = []
    for command in ([sys.executable], FLUIDTUNE):
        done = run(tmp_path, [*command, *words])
        status, errors = done.returncode, done.stderr.splitlines()
        if NOT_CALLED in done.stderr:  # the script has called nothing, and that alone is another ending
            assert status == 2 and command == FLUIDTUNE
            status, errors = 0, [line for line in errors if NOT_CALLED not in line]
        out = tmp_path / "out"
        found.append((status, done.stdout, errors, out.read_bytes()[10:] if out.exists() else None))
        out.unlink(missing_ok=True)
    stock, ours = found
    assert ours == stock
    assert said in stock[1] + "\n".join(stock[2])


SEARCH = """
import gc, sys
thresholds = gc.get_threshold()
class Cycle:
    def __init__(self): self.me = self
    def __del__(self): print("found", "gone", flush=True)
cycle = Cycle()
rows = open("rows", "w")
import inspect, os, signal, threading
from pathlib import Path
import torch
from ray import tune

HERE = Path(__file__).parent

def double(x: int) -> int:
    return 2 * x

def train(config):
    source = inspect.getsource(double)
    tune.report({"a": (HERE / "data").read_text(), "b": torch.jit.script(double)(4), "c": source, "d": __name__})

def main():
    results = tune.Tuner(train, param_space={"x": tune.grid_search([1, 2])}, run_config=tune.RunConfig(
        storage_path=sys.argv[1], verbose=0)).fit()
    for result in results:
        rows.write("a row\\n")
        print("found", [result.metrics.get(name) for name in "abcd"], result.error)

if __name__ == "__main__":
    main()
    print("found", torch.jit.script(double)(4), gc.get_threshold() == thresholds, gc.get_freeze_count(), gc.isenabled())
    print("found", __file__, sys.argv[0], sys.path[0], vars(sys.modules["__main__"]) is globals())
    print("found", [signal.getsignal(n).__qualname__ for n in (signal.SIGINT, signal.SIGTERM)])
    print("found", [t.name for t in threading.enumerate() if not t.daemon], sys.excepthook.__qualname__)
    sys.stdout.flush()
    del cycle
    gc.collect()
    print("found", "end")
    sys.exit(7)
"""


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
def test_a_script_after_its_search(tmp_path: Path) -> None:
    found = []
    for command in ([sys.executable], FLUIDTUNE):
        at = tmp_path / "at"
        at.mkdir(exist_ok=True)
        (at / "script.py").write_text(SEARCH)
        (at / "data").write_text("data")
        done = run(at, [*command, "script.py", str(tmp_path / "storage")])
        lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        found.append((done.returncode, lines, (at / "rows").read_text()))
        assert len(lines) == 8, done.stdout[-3000:] + done.stderr[-3000:]
    stock, ours = found
    assert ours == stock
    assert stock[0] == 7 and stock[1][-2:] == ["found gone", "found end"] and stock[2] == 2 * "a row\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "from ray import tune",
        "from ray.tune import Tuner, run",
        "from ray.train import Checkpoint",
        "import ray; init = ray.init; import ray.tune.tuner",
        "import threading; t = threading.Thread(target=__import__, args=['ray.tune']); t.start(); t.join()",
    ],
)
def test_fluidtune_stands_in_from_the_import_of_ray_on(imports: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"import os, sys\n{imports}\nimport ray; from ray import tune\ninit = globals().get('init', ray.init)\n"
        "print(tune.run.__module__, tune.Tuner.__module__, [f for f in sys.meta_path if 'Ray' in str(f)])\n"
        "print(os.path.basename(init.__code__.co_filename), 'PYTHONHASHSEED' in os.environ)\n"
    )
    done = run(tmp_path, [*FLUIDTUNE, "script.py"])
    assert done.stdout.splitlines() == ["fluidtune.tune.api fluidtune.tune.api []", "stand_ins.py True"], done.stderr


@pytest.mark.slow
def test_a_script_may_call_fluidtunes_own_tuner(tmp_path: Path) -> None:
    """Seen: `fluidtune run` ended with status 2 and said that such a script had called nothing."""
    (tmp_path / "script.py").write_text(
        "import os; os.environ['TUNE_DISABLE_AUTO_INIT'] = '1'\nimport fluidtune\n"
        "try:\n    fluidtune.Tuner(lambda config: None).fit()\nexcept Exception as error:\n    print(error)\n"
    )
    done = run(tmp_path, [*FLUIDTUNE, "script.py"])
    assert done.returncode == 0 and NOT_CALLED not in done.stderr, done.stdout + done.stderr

"""Libraries that are imported by two threads of a trial at a time, or whose import fails. See docs/bugs.md, 216."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

#: A library under the name of one whose settings are known. Its import waits in the middle, or fails there.
MATPLOTLIB = """
import sys
events = sys.events
events.halfway.set()
events.go_on.wait()
if events.fails:
    raise ImportError("this matplotlib does not work here")
rcParams = {"setting": 1}
"""
SCRIPT = """
import sys, threading, types
from fluidtune.cluster.process_reset import ProcessBaseline

sys.path.insert(0, {folder!r})
sys.events = types.SimpleNamespace(halfway=threading.Event(), go_on=threading.Event(), fails={fails})
assert "matplotlib" not in sys.modules
baseline = ProcessBaseline(watch=True)
errors = []

def first():
    try:
        import matplotlib
    except Exception as error:
        errors.append(error)

thread = threading.Thread(target=first, daemon=True)
thread.start()
sys.events.halfway.wait()
import a_library_of_the_other_thread
baseline.note_imports()
sys.events.go_on.set()
thread.join()
if sys.events.fails:
    assert [type(error) for error in errors] == [ImportError], errors
else:
    assert not errors, errors
    settings = sys.modules["matplotlib"].rcParams
    settings["setting"] = 2

    def restored(settings=settings):
        baseline.restore()
        assert settings == {{"setting": 1}}, settings

    restored()
print("as expected")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_an_import_ends_while_another_thread_is_in_the_middle_of_one(fails: bool, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    (folder / "matplotlib").mkdir(parents=True)
    (folder / "matplotlib" / "__init__.py").write_text(MATPLOTLIB)
    (folder / "a_library_of_the_other_thread.py").write_text("")
    script = SCRIPT.format(folder=str(folder), fails=fails)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "as expected", ended.stderr

"""Libraries that a thread is importing when the process is looked at, or whose import fails. See docs/bugs.md, 216."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

#: A library under the name of one whose settings are known. Its import waits in the middle, or fails there.
TORCH = """
import sys
events = sys.events
events.halfway.set()
events.go_on.wait()
if events.fails:
    raise ImportError("this torch does not work here")
"""
SCRIPT = """
import sys, threading, types
from fluidtune.cluster.cleaning.process_reset import ProcessBaseline

def first(errors):
    try:
        import torch
    except Exception as error:
        errors.append(type(error))

def main(errors):
    baseline = ProcessBaseline()
    thread = threading.Thread(target=first, args=(errors,), daemon=True)
    thread.start()
    sys.events.halfway.wait()
    if sys.events.fails:
        sys.events.go_on.set()
        thread.join()
        assert errors == [ImportError], errors
    print(baseline.restore())

sys.path.insert(0, {folder!r})
sys.events = types.SimpleNamespace(halfway=threading.Event(), go_on=threading.Event(), fails={fails})
assert "torch" not in sys.modules
main([])
"""


@pytest.mark.parametrize(
    "fails, found",
    [
        (False, "it could not be looked at: AttributeError: partially initialized module 'torch'"),
        (True, "None"),
    ],
)
def test_the_process_ends_while_a_thread_is_in_the_middle_of_an_import(fails: bool, found: str, tmp_path: Path) -> None:
    (tmp_path / "site-packages" / "torch").mkdir(parents=True)
    (tmp_path / "site-packages" / "torch" / "__init__.py").write_text(TORCH)
    script = SCRIPT.format(folder=str(tmp_path / "site-packages"), fails=fails)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.stdout.startswith(found), ended.stderr

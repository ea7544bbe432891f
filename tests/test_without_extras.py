"""What `pip install fluidtune` alone does: each command and name works, or says what installs the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: What only the extras of pyproject.toml bring.
ABSENT = ["uvicorn", "starlette", "httptools", "msgspec", "prometheus_client", "uvloop", "httpx"]
LACKING = "uvicorn, starlette, httptools, msgspec, prometheus_client, uvloop"
BEGIN = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"


@pytest.mark.parametrize(
    "code, status, said",
    [
        ("import fluidtune, inspect; inspect.getmembers(fluidtune); exec('from fluidtune import *')", 0, ""),
        ("doctor", 0, f"--    serve: no {LACKING}; for `fluidtune serve` type"),
        ("serve start . --load a:b --slo 1", 2, f'not installed: {LACKING}; type: pip install "fluidtune[serve]"'),
        ("serve --help", 0, "Usage"),
    ],
)
def test_without_extras(code: str, status: int, said: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = code if "import" in code else f"from fluidtune.cli import main; sys.argv[1:] = {code.split()}; main()"
    command = [sys.executable, "-c", BEGIN + run]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status and said in done.stdout + done.stderr, done
    assert "Traceback" not in done.stderr

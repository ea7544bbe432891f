"""`make release-check`: build the release's files, look into them, and use the wheel alone, outside the checkout.

1. ``python -m build`` makes the sdist from the files that git tracks and the wheel from the sdist, in ``dist/``.
2. ``twine check --strict`` reads what the registry will read.
3. The wheel must have each module, stub and static file that git tracks in the packages, the pages that `fluidtune
   docs` shows, and nothing else.
4. A new virtual environment gets the wheel with ``[serve,view,client]`` and nothing of the checkout. In an empty
   directory the commands of the README are tried: doctor, docs, a job by ``fluidtune run`` (the script of
   docs/start.md), report, why, view, and a service that answers a request.

``--tag v0.1.0`` also compares a tag with the version. The last line says what it took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

import fluidtune
from tools.house_rules import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
#: Seconds that one command may take. Judgement: torch is installed from a slow mirror on a busy machine.
LIMIT_S = 900
#: Pages that the wheel must have for whoever has no network: those that the README and messages name first.
PAGES = ("start", "questions", "view", "how-to/troubleshooting", "reference/settings")
#: A search whose best model multiplies by 3 and is served. It runs in the bare environment.
SERVED = """
import json, os, tempfile
import fluidtune
from ray import tune

def train(config):
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "factor.json"), "w") as file:
            json.dump(config["factor"], file)
        tune.report({"score": config["factor"]}, checkpoint=tune.Checkpoint.from_directory(directory))

def load(directory, config):
    with open(os.path.join(directory, "factor.json")) as file:
        factor = json.load(file)
    def multiply(numbers):
        return [factor * number for number in numbers]
    multiply.samples = [1.0]
    return multiply

if __name__ == "__main__":
    tuner = fluidtune.Tuner(
        train,
        param_space={"factor": tune.grid_search([2, 3])},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(name="served", storage_path=os.getcwd(), verbose=0),
    )
    with fluidtune.serve(tuner.fit(), load, slo=5.0, port=PORT) as served, fluidtune.Client(served.url) as client:
        assert client(14.0) == 42.0
    print("a service answered", flush=True)
"""


def said(command: Sequence[object], expect: str = "", **settings: object) -> str:
    """Run a command. Ends the program with its output if it fails, or does not print what is expected."""
    began = time.perf_counter()
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        **settings,  # type: ignore[call-overload]
    )
    shown = " ".join(str(word) for word in command[:5])
    if done.returncode or expect not in done.stdout:
        sys.exit(f"{shown}\n{done.stdout}\nexit status {done.returncode}; expected {expect!r}")
    print(f"{time.perf_counter() - began:6.1f} s  {shown}", flush=True)
    return str(done.stdout)


def tracked(*places: str) -> list[str]:
    found = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in found.stdout.split("\0") if name]


def build(folder: Path) -> Path:
    """The wheel, made from what git tracks: ignored files and those of other builds stay out."""
    for name in tracked():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    shutil.rmtree(DIST, ignore_errors=True)
    said([sys.executable, "-m", "build", "--outdir", DIST, folder], "Successfully built")
    said([sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir()])
    return next(DIST.glob("*.whl"))


def misplaced(wheel: Path) -> list[str]:
    """What the wheel has and should not, or lacks."""
    with zipfile.ZipFile(wheel) as file:
        there = {name for name in file.namelist() if ".dist-info/" not in name}
    pages = {name for name in there if re.fullmatch(r"fluidtune/docs/(.*\.md|operations/\w+(\.json)?)", name)}
    wanted = {name for name in tracked(*PACKAGES) if not (ROOT / name).is_symlink()}
    lacking = [*(wanted - there), *({f"fluidtune/docs/{name}.md" for name in PAGES} - pages)]
    return [*(f"lacks {name}" for name in lacking), *(f"should not have {name}" for name in there - pages - wanted)]


def use(wheel: Path, folder: Path) -> None:
    """Try the README's commands with the wheel alone. ``folder``: an empty one outside the checkout."""
    said([sys.executable, "-m", "venv", folder / "venv"])
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    said([*pip, "torch"])
    said([*pip, f"{wheel}[serve,view,client]"])
    work = folder / "work"
    work.mkdir()
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_", "VIRTUAL_ENV"))}
    bare |= {"PATH": f"{folder}/venv/bin:{bare['PATH']}", "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    inside = {"cwd": work, "env": bare}
    where = "import fluidtune, themis_bridge, salus_share, symphony_serve; print(fluidtune.__file__)"
    said([folder / "venv/bin/python", "-c", where], str(folder), **inside)
    said(["fluidtune", "--version"], fluidtune.__version__, **inside)
    doctor = subprocess.run(["fluidtune", "doctor"], capture_output=True, text=True, **inside)  # type: ignore[call-overload]
    if "ok    ray" not in doctor.stdout:
        sys.exit(f"fluidtune doctor: {doctor.stdout}{doctor.stderr}")
    for words in ([], ["start"], ["why", "grow"]):
        said(["fluidtune", "docs", *words], **inside)
    page = (ROOT / "docs/start.md").read_text()
    (work / "first.py").write_text(next(iter(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))))
    said(["fluidtune", "run", "first.py"], "'x':", **inside)
    run = folder / "ray_results/first"
    said(["fluidtune", "report", run, "--html", work / "page.html"], "iterations", **inside)
    trial = json.loads((run / "summary.json").read_text())["best_trial"]
    said(["fluidtune", "why", run, trial], trial, **inside)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (work / "served.py").write_text(SERVED.replace("PORT", str(free.getsockname()[1])))
    said(["python", "served.py"], "a service answered", **inside)
    view = subprocess.Popen(["fluidtune", "view"], stdout=subprocess.PIPE, text=True, **inside)  # type: ignore[call-overload]
    try:
        address = view.stdout.readline().split()[0]
        for path, text in (("", "FluidTune"), ("api/runs", "first"), ("static/uPlot.iife.min.js", "uPlot")):
            with urllib.request.urlopen(f"{address}{path}", timeout=60) as answer:
                assert text in answer.read().decode(), path
    finally:
        view.terminate()
        view.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tag", help="as v0.1.0; must be that of the version")
    tag = parser.parse_args().tag
    if tag not in (None, f"v{fluidtune.__version__}"):
        sys.exit(f"the tag is {tag}, and fluidtune.__version__ is {fluidtune.__version__}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ft-") as folder:
        wheel = build(Path(folder, "source"))
        if wrong := misplaced(wheel):
            sys.exit("\n".join(wrong))
        use(wheel, Path(folder))
    print(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) works alone; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

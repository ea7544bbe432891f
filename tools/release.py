"""`make release` cuts a version. `make release-check` builds its files, and uses the wheel alone, outside the checkout.

``--cut 0.2.0`` gives the changelog's section of unreleased changes this version and today's date, and sets
``fluidtune.__version__``. Then, as ``make release-check`` does:

1. ``python -m build`` makes the sdist from the files that git tracks and the wheel from the sdist, in ``dist/``.
2. ``twine check --strict`` reads what the registry will read.
3. The wheel must have each module, stub and static file that git tracks in the packages, the pages that `fluidtune
   docs` shows, and nothing else.
4. For each Python from 3.10 to 3.13 that is here, a new virtual environment gets the wheel and nothing of the
   checkout; and one more the oldest Ray. In an empty directory the commands of the README are tried: doctor, docs, a
   job by ``fluidtune run`` (the script of docs/start.md), report, why. View and serve say what to install; it is, and
   a page is shown, and a service answers a request.

Nothing is committed, tagged or published. ``--tag v0.1.0`` also compares a tag with the version. The last line says
what it took.
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


def cut(version: str, root: Path, day: str) -> None:
    """Make the unreleased changes those of ``version``, or end with a line that says why not. ``day``: 2026-11-29."""
    log, package = root / "CHANGELOG.md", root / "fluidtune/__init__.py"
    sections = re.findall(r"^## (\S+) - (\S+)$", log.read_text(), re.MULTILINE)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"{version!r} is no version; give one such as 0.2.0")
    if not sections or sections[0][1] != "unreleased":
        sys.exit(f"the first section of {log} is not `## X.Y.Z - unreleased`; there is nothing to release")
    if any(_numbers(version) <= _numbers(name) for name, date in sections if date != "unreleased"):
        sys.exit(f"{version} is not above the releases of {log}")
    heading = f"## {sections[0][0]} - unreleased"
    log.write_text(log.read_text().replace(heading, f"## {version} - {day}", 1))
    text = re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', package.read_text(), flags=re.MULTILINE)
    package.write_text(text)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def environments() -> list[tuple[str, str]]:
    """The Pythons of pyproject.toml that are here, and the file of the versions that each gets."""
    names = [path for minor in range(10, 14) if (path := shutil.which(f"python3.{minor}"))]
    # A shim of a version manager stands in PATH also for a Python that is not switched on, and then fails.
    found = [path for path in names if not subprocess.run([path, "-V"], capture_output=True).returncode]
    found = found or [sys.executable]
    # Ray 2.44 has no wheel for Python 3.13.
    return [*((path, "constraints.txt") for path in found), (found[0], "constraints-oldest.txt")]


def use(wheel: Path, folder: Path, version: str, python: str, constraints: str) -> None:
    """Try the README's commands with the wheel alone. ``folder``: an empty one outside the checkout."""
    said([python, "-m", "venv", folder / "venv"])
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "-q", "-c", ROOT / constraints]
    said([*pip, "torch"])
    said([*pip, wheel])
    work = folder / "work"
    work.mkdir()
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_", "VIRTUAL_ENV"))}
    bare |= {"PATH": f"{folder}/venv/bin:{bare['PATH']}", "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    inside = {"cwd": work, "env": bare}
    where = (
        "from fluidtune import *; import fluidtune, themis_bridge, salus_share, symphony_serve as s; print(s.__file__)"
    )
    said([folder / "venv/bin/python", "-c", where], str(folder), **inside)
    said(["fluidtune", "--version"], version, **inside)
    said(["fluidtune", "doctor"], "ok    ray", **inside)
    for words in ([], ["start"], ["why", "grow"]):
        said(["fluidtune", "docs", *words], **inside)
    page = (ROOT / "docs/start.md").read_text()
    (work / "first.py").write_text(next(iter(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))))
    said(["fluidtune", "run", "first.py"], "'x':", **inside)
    run = folder / "ray_results/first"
    said(["fluidtune", "report", run, "--html", work / "page.html"], "iterations", **inside)
    trial = json.loads((run / "summary.json").read_text())["best_trial"]
    said(["fluidtune", "why", run, trial], trial, **inside)
    for extra, command in (("view", ["view", run]), ("serve", ["serve", "start", run, "--load", "a:b", "--slo", "1"])):
        lacking = subprocess.run(["fluidtune", *command], capture_output=True, text=True, **inside)  # type: ignore[call-overload]
        if f'type: pip install "fluidtune[{extra}]"' not in lacking.stderr or lacking.returncode != 2:
            sys.exit(f"fluidtune {command[0]}: {lacking.stdout}{lacking.stderr}")
    said([*pip, f"{wheel}[serve,view,client]"])
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
    parser.add_argument("--cut", metavar="VERSION", help="release the unreleased changes as this version")
    args = parser.parse_args()
    if args.cut:
        cut(args.cut, ROOT, time.strftime("%Y-%m-%d"))
    version = args.cut or fluidtune.__version__
    if args.tag not in (None, f"v{version}"):
        sys.exit(f"the tag is {args.tag}, and fluidtune.__version__ is {version}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ft-") as folder:
        wheel = build(Path(folder, "source"))
        if wrong := misplaced(wheel):
            sys.exit("\n".join(wrong))
        for number, (python, constraints) in enumerate(environments()):
            print(f"{python}, {constraints}", flush=True)
            use(wheel, Path(folder, str(number)), version, python, constraints)
    print(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) works alone; {time.perf_counter() - began:.0f} s")
    if args.cut:
        print(f"commit CHANGELOG.md and fluidtune/__init__.py; to publish, push the tag v{version}")


if __name__ == "__main__":
    main()

"""`make ray-suite RAY=DIRECTORY`: run Ray Tune's own tests under stock Ray Tune and under FluidTune, and compare.

DIRECTORY is a checkout of Ray's repository, best at the release that is installed. Nothing is fetched, and nothing in
the checkout is changed: Ray's wheel has no tests, so a directory is made that looks like the installed ``ray`` with the
checkout's tests in it. The tests need packages that FluidTune does not need (``boto3``, ``moto``, ``mock``). A file
that cannot be collected is named.

Each file of tests runs in one process under FluidTune. Only the tests that do not pass there run under stock too, and
those that pass under stock run under FluidTune a second time. One that fails again and does not stand in the table of
docs/ray-suite.md makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
#: Its table has the tests that pass under stock Ray Tune and not under FluidTune, each with its reason.
DIFFERENCES = ROOT / "docs" / "ray-suite.md"
#: The test directories of the checkout that the tests of Tune import from.
TEST_DIRECTORIES = ("ray/tune/tests", "ray/train/tests", "ray/train/v2/tests", "ray/tests")
#: Seconds for one file of tests. The slowest one, `test_api.py`, takes 400 s on two cores.
FILE_LIMIT_S = 1800.0
#: The keys of the result that count tests.
COUNTS = [f"{group}_pass_{where}" for group in ("all", "with_executor") for where in ("fluidtune", "stock", "neither")]
#: What an outcome is called, by its tag in pytest's report.
WORDS = {"error": "error", "failure": "failed", "skipped": "skipped"}


def overlay(checkout: Path, directory: Path) -> None:
    """Make a ``ray`` package in ``directory`` that is the installed one, by links, with the checkout's tests.

    Ray's workers find it through PYTHONPATH, as the driver does.
    """
    import ray

    installed = Path(ray.__file__).parent
    for tests in TEST_DIRECTORIES:
        source, target = checkout / "python" / tests, directory / tests
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("BUILD*", "__pycache__"))
    _link(installed, directory / "ray")


def _link(installed: Path, target: Path) -> None:
    """Link every entry of an installed package that ``target`` lacks; go down where both are directories."""
    target.mkdir(exist_ok=True)
    for entry in installed.iterdir():
        there = target / entry.name
        if not there.exists():
            there.symlink_to(entry)
        elif there.is_dir():
            _link(entry, there)


class Outcome(NamedTuple):
    """What became of one test. ``took_part``: FluidTune's executor ran trials of it."""

    word: str
    took_part: bool


def run_tests(place: Path, side: str, tests: Sequence[str], logs: Path | None = None) -> dict[str, Outcome]:
    """Run tests in one process. Returns their outcomes by test id: "passed", "failed", "error" or "skipped".

    ``place``: the directory of `overlay`. ``side``: "stock" or "fluid". ``tests``: files or test ids below ``place``.
    ``logs``: a directory that keeps the output. Without a report, as after a crash, the result is empty.
    """
    with tempfile.TemporaryDirectory(prefix="rs-", ignore_cleanup_errors=True) as temporary:
        report, log = Path(temporary, "report.xml"), Path(temporary, "log")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.ray_suite_plugin", "-p", "no:cacheprovider"]
        command += [f"--rootdir={place}", f"--junitxml={report}", "-o", "junit_family=xunit1", "-o", "timeout=300"]
        path = [str(place), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {
            **os.environ,
            "RAY_SUITE_SIDE": side,
            "PYTHONPATH": os.pathsep.join(path),
            # The run's own: the clusters of other runs are not found there.
            "TMPDIR": temporary,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *tests], cwd=place, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                process.wait(FILE_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outcomes = read_report(report) if report.exists() else {}
        if all("::" not in test for test in outcomes):
            print(f"no test of {tests} ran under {side}; the last lines:\n{log.read_text()[-1500:]}", file=sys.stderr)
        if logs is not None:
            file = Path(tests[0].partition("::")[0])
            number = len(list(logs.glob(f"{file.stem}.{side}.*")))
            shutil.copy(log, logs / f"{file.stem}.{side}.{number}.log")
        return outcomes


def read_report(report: Path) -> dict[str, Outcome]:
    """Read pytest's report, an XML file of the family "xunit1"."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("file", "")
        module = file.removesuffix(".py").replace("/", ".")
        inner = case.get("classname", "").removeprefix(module).strip(".")
        # A file that cannot be collected is one case with the module's name.
        name = case.get("name", "") if case.get("name") != module else ""
        test = "::".join(filter(None, [file, inner.replace(".", "::"), name]))
        tags = {child.tag for child in case}
        word = next((word for tag, word in WORDS.items() if tag in tags), "passed")
        took_part = any(each.get("name") == "fluidtune" for each in case.iter("property"))
        if test not in found or word != "passed":  # a failed teardown has an entry of its own
            found[test] = Outcome(word, took_part)
    return found


def known_differences(page: str) -> dict[str, str]:
    """The tests in the page's table, each with its reason. A test is named by its id from the file's name on."""
    return {match[1]: match[2].strip() for match in re.finditer(r"^\| `(test_[^`]+)` \|(.+)\|$", page, re.MULTILINE)}


def main(arguments: Sequence[str] | None = None, laid: Callable = overlay, run: Callable = run_tests) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ray_suite", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Ray's repository")
    parser.add_argument("files", nargs="*", help="files of python/ray/tune/tests; all test_*.py if none is given")
    parser.add_argument("--logs", type=Path, help="a directory that keeps what the tests printed")
    options = parser.parse_intermixed_args(arguments)
    tests = options.checkout / "python" / TEST_DIRECTORIES[0]
    if not tests.is_dir():
        parser.error(f"{options.checkout} has no {tests.relative_to(options.checkout)}: give a checkout of Ray")
    for file in options.files:
        if not (tests / file).is_file():
            parser.error(f"there is no {file} in {tests}")
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    known = known_differences(DIFFERENCES.read_text())
    files = options.files or sorted(file.name for file in tests.glob("test_*.py"))
    worse: list[str] = []
    tally = dict.fromkeys(COUNTS, 0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ray-suite-") as directory:
        place = Path(directory)
        laid(options.checkout, place)
        for file in files:
            started = time.monotonic()
            fluid, stock = both_sides(place, f"{TEST_DIRECTORIES[0]}/{file}", options.logs, run)
            names = [test.removeprefix(f"{TEST_DIRECTORIES[0]}/") for test in lost(stock, fluid)]
            worse += names
            count(stock, fluid, tally)
            seconds = time.monotonic() - started
            print(f"{file}: {len({*fluid, *stock})} tests, {seconds:.0f} s", *names, sep="\n  ", file=sys.stderr)
    new = [name for name in worse if name not in known]
    run = {"ray": version("ray"), "cores": os.cpu_count(), "files": files, "seconds": round(time.monotonic() - began)}
    print(json.dumps({**run, **tally, "differences": worse, "not_listed": new}))
    return 1 if new else 0


def both_sides(
    place: Path, file: str, logs: Path | None, run: Callable
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Run a file under FluidTune, and under stock only what did not pass. Returns the outcomes, FluidTune's first."""
    fluid = run(place, "fluid", [file], logs)
    # After a crash nothing is known of any test.
    doubtful = [test for test, each in fluid.items() if each.word != "passed"] if fluid else [file]
    stock = run(place, "stock", doubtful, logs) if doubtful else {}
    again = lost(stock, fluid)
    if again:
        fluid.update(run(place, "fluid", again, logs))
    return fluid, stock


def lost(stock: Mapping[str, Outcome], fluid: Mapping[str, Outcome]) -> list[str]:
    """The tests that pass under stock and not under FluidTune."""
    return [test for test, each in stock.items() if each.word == "passed" and _word(fluid, test) != "passed"]


def count(stock: Mapping[str, Outcome], fluid: Mapping[str, Outcome], tally: dict[str, int]) -> None:
    """Count the tests that pass under FluidTune, under stock only ("stock") and under neither."""
    for test in {*fluid, *stock}:
        sides = {"fluidtune": fluid, "stock": stock}
        where = next((side for side, outcomes in sides.items() if _word(outcomes, test) == "passed"), "neither")
        took_part = test in fluid and fluid[test].took_part
        for group in ("all", *["with_executor"] * took_part):
            tally[f"{group}_pass_{where}"] += 1


def _word(outcomes: Mapping[str, Outcome], test: str) -> str:
    return outcomes[test].word if test in outcomes else "missing"


if __name__ == "__main__":
    sys.exit(main())

"""Writes down how long each file of tests took in the last runs of `make test` and `make test-all`.

``python -m tools.durations`` reads the reports that those runs have left in ``.pytest_cache``, and writes
``tests/durations.csv``: the part of the run, the file, its number of tests, and their seconds, set-up and end included.
Two processes run tests with Ray at a time, so a person waits for about half of the seconds of a part.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / ".pytest_cache"
WRITTEN = ROOT / "tests" / "durations.csv"


def by_file(report: str) -> dict[str, tuple[int, float]]:
    """A report of pytest (``--junitxml``): file -> its number of tests, and their seconds."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for case in ElementTree.fromstring(report).iter("testcase"):
        # A class of tests follows the name of its file.
        parts = [part for part in case.get("classname", "").split(".") if part[:1].islower()]
        tests, seconds = found["/".join(parts) + ".py"]
        found["/".join(parts) + ".py"] = tests + 1, seconds + float(case.get("time", 0.0))
    return dict(found)


def main() -> int:
    reports = sorted(REPORTS.glob("*.xml"))
    if not reports:
        print(f"no report in {REPORTS}: run make test or make test-all first", file=sys.stderr)
        return 1
    with open(WRITTEN, "w", newline="") as file:
        file.write(f"# {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("part", "file", "tests", "seconds"))
        for report in reports:
            for name, (tests, seconds) in sorted(by_file(report.read_text()).items(), key=lambda item: -item[1][1]):
                rows.writerow((report.stem, name, tests, f"{seconds:.1f}"))
    print(f"written: {WRITTEN.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

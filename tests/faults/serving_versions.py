"""Other checkpoints are deployed and rolled back under load.

``python -m tests.faults.serving_versions --rounds 200``. Each round deploys the trial that does not serve, in one of
the `KINDS`: at once, at once and back, as a canary that is promoted, or as one that is rolled back. Clients ask
meanwhile. Each request must get one response. Each answer names its version; it must be what that version's trial
answers, and the event log must say that the version was there: it had begun to serve before the answer came, and had
ended an SLO before it at most. In the end nothing is left.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fluidtune
from fluidtune.report import read_events
from fluidtune.report.serving_report import summarise_serving
from tests.conftest import assert_nothing_left
from tests.faults.serving import SLO_S, Clients, cluster_that_ends, status, until
from tests.serving import runs

KINDS = ("moved", "moved and back", "promoted", "canary and back")
#: The share of a canary.
SHARE = 0.3


class Asking(Clients):
    """Clients that know the factor of each version, and note which one has answered when, in Unix time."""

    #: Without a pause, four clients leave a machine of two cores no time to start a process in.
    pause_s = 0.02

    def __init__(self, port: int, factors: dict[str, int]):
        self._factors = factors
        self.answered: list[tuple[float, str]] = []
        super().__init__(port)

    def factor(self, version: str | None) -> float:
        assert version is not None
        self.answered.append((time.time(), version))
        return self._factors.get(version, float("nan"))


def one_round(kind: str, run: Path, served: Any, factors: dict[str, int], ids: dict[int, str]) -> None:
    """Deploy the trial that does not serve. factors: by version, by what its trial multiplies; the new one is added."""
    now = served.status()["trials"][0]
    other = 5 - factors[str(now["version"])]
    number = max(one["version"] for one in served.status()["trials"]) + 1
    factors[str(number)] = other  # Before it can answer.
    canary = SHARE if "canary" in kind or kind == "promoted" else 1.0
    version = served.deploy(run, ids[other], canary)
    assert (version["version"], version["state"]) == (number, "canary" if canary < 1 else "serving"), version
    if kind == "promoted":
        served.promote()
    elif kind != "moved":
        served.rollback()
    after = served.status()["trials"][0]["version"]
    assert after == (now["version"] if "back" in kind else number), (kind, after)


def times_of(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """By version, from when and until when it was ready to answer, in Unix time."""
    found: dict[str, tuple[float, float]] = {"1": (0.0, float("inf"))}
    for event in events:
        if event["event"] == "version_changed":
            begin, end = found.get(str(event["version"]), (float("inf"), float("inf")))
            if event["state"] in ("serving", "canary"):
                begin = min(begin, event["t"])
            elif event["state"] in ("ended", "refused"):
                end = event["t"]
            found[str(event["version"])] = begin, end
    return found


def rounds(count: int, directory: Path, port: int) -> Counter[str]:
    """``count`` rounds in a cluster of two CPUs. What became of all requests."""
    with cluster_that_ends():
        run = runs.run(directory)
        ids = {factor: trial for trial, factor in runs.factors(run).items()}
        factors = {"1": 3}
        with fluidtune.serve(run, runs.load, SLO_S, port=port) as served:
            clients = Asking(port, factors)
            try:
                until(lambda: clients.became["answered"] > 20, "an answer")
                for number in range(count):
                    kind = KINDS[number % len(KINDS)]
                    one_round(kind, run, served, factors, ids)
                    some = clients.became["answered"]
                    until(lambda some=some: clients.became["answered"] > some + 4, "an answer after the round")
                    print(
                        f"round {number}: {kind}: {dict(clients.became)}, {clients.gap:.2f} s without one", flush=True
                    )
            finally:
                became = clients.end()
            assert status()["unanswered"] == 0
        faults = [what for what in became if what not in ("answered", "refused")]
        assert not faults, faults
        events = read_events(run / "serving" / "fluid_events.jsonl")
        counted = sum(summarise_serving(events).requests.values(), Counter[str]())
        print(f"the log has {dict(counted)}", flush=True)
        assert counted["answered"] == became["answered"], (counted, became)
        ready = times_of(events)
        for came, version in clients.answered:
            begin, end = ready[version]
            assert begin <= came <= end + SLO_S, f"version {version} has answered at {came}, not in {ready[version]}"
        assert_nothing_left()
    return became


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--port", type=int, default=8124)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(dict(rounds(args.rounds, Path(directory), args.port)))


if __name__ == "__main__":
    main()

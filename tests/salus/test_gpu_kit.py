"""What `benchmarks.gpu` asks of a GPU: how much, and what counts as held. Its page: tests/benchmarks/test_gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")  # a machine with a GPU may have none, and these tests are not for it

from benchmarks.common import ROOT
from benchmarks.gpu.__main__ import Outcome, Part, Report, go_through, judge_probe, judge_salus, judge_searches, parts
from benchmarks.gpu.probes import PROBES
from benchmarks.gpu.salus import ADMISSION_S, ADMISSIONS, Plan, admissions, latencies
from benchmarks.gpu.search import pictures, space

pytestmark = pytest.mark.slow


def held(part: str, figures: dict) -> bool | None:
    (claim,) = judge_salus(Outcome(0, 1.0, "", {"rehearsal": False, part: figures}))
    return claim.held


@pytest.mark.parametrize(
    ("admitted", "out_of_memory", "well"),
    [(1000, 0, True), (1000, 1, False), (400, 0, None), (400, 1, False), (0, 0, False)],
)
def test_a_thousand_admissions_are_asked_for(admitted: int, out_of_memory: int, well: bool | None) -> None:
    assert held("admissions", {"admitted": admitted, "out_of_memory": out_of_memory}) is well


def test_as_many_are_made_in_every_size_and_end_with_their_time(monkeypatch) -> None:
    asked = []

    def together(work, rows):
        asked.append(rows)
        return 0.0, [(row[2], 0) for row in rows]

    monkeypatch.setattr("benchmarks.gpu.salus.together", together)
    for quick in (True, False):
        assert admissions(Plan("cuda:0", 8 << 30, 8, quick))["admitted"] == ADMISSIONS == 1000
    assert [rows[0][3] for rows in asked] == list(ADMISSION_S)
    limits = {part.name: part for part in parts(Path("out"), False, 1)}
    part = limits["salus, admissions"]
    assert "--quick" not in part.command and part.limit > max(ADMISSION_S)


@pytest.mark.parametrize(("models", "requests", "well"), [(42, 100, True), (41, 100, False), (42, 0, False)])
def test_models_are_counted(models: int, requests: int, well: bool) -> None:
    assert held("resident", {"models": models, "requests": requests, "milliseconds": 1.0}) is well


def test_models_that_were_admitted_are_counted_when_their_requests_begin(monkeypatch) -> None:
    found: list[int] = []

    def resident(begin, directory, seconds, device):
        from salus_share import Need
        from salus_share.client import LaneClient

        clients = [LaneClient("d", f"{at}", capacity=100, policy="PACK", directory=Path(directory)) for at in range(3)]
        for client in clients[:2]:
            client.admit(Need(10, 10))
        begin()
        for client in clients[:2]:
            client.leave()
        return [0.1, 0.2]

    def together(work, rows):
        found.append(work(lambda: None, *rows[0]) if work.__name__ == "counted" else [0.1, 0.2])
        return 0.0, found[-1:]

    monkeypatch.setattr("benchmarks.gpu.salus.resident", resident)
    monkeypatch.setattr("benchmarks.gpu.salus.together", together)
    assert latencies(Plan("cpu", 100, 2, True))["models"] == 2


def test_the_search_says_whether_its_trials_leave_the_gpu_idle() -> None:
    side = {"errors": [], "best": 0.9, "fit_seconds": 1.0}
    text = "a trial alone leaves the GPU idle half of the time"
    for idle, well in ((0.5, True), (0.1, False)):
        claims = {claim.text: claim.held for claim in judge_searches({"stock": side | {"idle": idle}}, False)}
        assert claims[text] is well


def test_the_search_is_of_real_size_on_a_gpu_and_its_pictures_are_the_same_everywhere() -> None:
    from benchmarks.gpu import search

    assert sum(parameter.numel() for parameter in search.network(search.WIDTH).parameters()) > 1_500_000
    assert search.MOST == 50_000 and search.PACED >= 8_000
    first, second = (pictures(600, 1, 2.0).tensors for _ in range(2))
    assert (first[0] == second[0]).all() and first[0].shape == (600, 3, 32, 32)
    assert space({"images": 5}, 9)["images"] == 5
    stock = [part for part in parts(Path("out"), False, 1) if part.name == "search, stock"]
    assert "--trials" not in stock[0].command, "nine trials and nine epochs, as the script has them"


def test_every_question_is_a_part_with_an_end_and_the_one_that_harms_others_is_named() -> None:
    gpu, core = ({p.name: p for p in parts(Path("out"), rehearsal, 1)} for rehearsal in (False, True))
    asked = {name.removeprefix("probe, ") for name in gpu if name.startswith("probe")}
    assert asked == PROBES.keys() - {"mps_killed"}
    assert all(gpu[f"probe, {name}"].limit <= 60 for name in asked)
    rehearsed = {name.removeprefix("probe, ") for name in core if name.startswith("probe")}
    assert rehearsed == {name for name, probe in PROBES.items() if probe.cores} and rehearsed


RIGHT = {
    "context": {"by_process_mb": None, "by_gpu_mb": 500, "taken_for_mb": 600},
    "unload": {"left_behind": None, "benchmark": False, "allocated": 0, "reserved": 1 << 20},
    "two_ranks": {"ranks": ["CannotDivide: NCCL does not connect the GPUs: Duplicate GPU detected"] * 2},
    "killed_peers": {"lost": "GroupLost: worker 1 of generation 1 has died", "seconds": 0.5, "after": "summed"},
    "communicator": {"grown_mb": 3, "abort_s": 0.1, "kernel_s": 3.0},
    "visible": {"nvml": "GPU-ab", "by_uuid": ["1", "ab"], "by_number": ["1", "ab"]},
    "full": {"cublas": "known", "cudnn": "worked"},
    "loader": {"sum": 523776.0},
    "clock": {"launched_s": 0.1, "done_s": 1.0},
    "mps_killed": {"had": True, "beside": {"mean_times_2048": 1.0}, "after": ["computes", {"mean_times_2048": 1.0}]},
}
WRONG = {
    "context": {"by_process_mb": 700},
    "unload": {"allocated": 1 << 30},
    "two_ranks": {
        "ranks": ["CannotDivide: NCCL does not connect the GPUs: Duplicate GPU detected", "no answer in 10 s"]
    },
    "killed_peers": {"seconds": 3.0},
    "communicator": {"abort_s": 2.9},
    "visible": {"by_number": ["1", "cd"]},
    "full": {"cudnn": "RuntimeError: odd"},
    "loader": {"sum": 0.0},
    "clock": {"launched_s": 1.0},
    "mps_killed": {"beside": {"raised": "CUDA error", "fault": True}},
}


@pytest.mark.parametrize("name", PROBES)
def test_what_counts_as_the_expected_answer(name: str) -> None:
    right = PROBES[name].right
    assert right(RIGHT[name]) is True and right(RIGHT[name] | WRONG[name]) is False


def test_what_cannot_be_told_is_not_held() -> None:
    nothing = {"by_process_mb": None, "by_gpu_mb": None, "taken_for_mb": 600}
    assert PROBES["context"].right(nothing) is None
    assert PROBES["mps_killed"].right({"had": False, "why": "no program"}) is None
    (claim,) = judge_probe(Outcome(None, 20.0, "so far"), "it ends")
    assert claim.held is False and "had not ended" in claim.found


def test_a_question_that_hangs_costs_its_limit_and_stops_no_other(tmp_path: Path) -> None:
    def asking(name: str, code: str, limit: float) -> Part:
        command = [sys.executable, "-c", code]
        return Part(f"probe, {name}", command, limit, lambda outcome: judge_probe(outcome, name), last_line_of_json)

    def last_line_of_json(output: str):
        return json.loads(output) if output else None

    (tmp_path / "logs").mkdir()
    report = Report(tmp_path, False, [])
    began = time.monotonic()
    answers = 'print(\'{"right": true, "answer": 7}\')'
    go_through([asking("hangs", "import time; time.sleep(600)", 0.5), asking("answers", answers, 60.0)], report, 600.0)
    assert [claims[0].held for _, _, claims in report.rows] == [False, True]
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("name", [name for name, probe in PROBES.items() if probe.cores])
def test_questions_that_a_core_can_answer(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.probes", name, "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    found = json.loads(done.stdout)
    assert found["right"] is True and done.stdout.count("\n") == 1, found


def test_an_answer_that_cannot_be_judged_is_a_line_all_the_same() -> None:
    code = (
        "import sys; from benchmarks.gpu import probes\n"
        "probes.PROBES['visible'] = probes.Probe(lambda device: {'by_uuid': ''}, 'one', probes.visible_is_right)\n"
        "sys.argv = ['probes', 'visible']; probes.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    found = json.loads(done.stdout)
    assert found["right"] is False and found["answer"]["by_uuid"] == "" and "KeyError" in found["answer"]["failed"]

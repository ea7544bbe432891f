"""`benchmarks.partners`: what it reads of the records, and that each rule is asked about recorded pairs only."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.partners import CAPACITY_MIB, Traits, read, run_all

HEAD = "model1,dataset1,batchsize1,amp1,speed1,model2,dataset2,batchsize2,amp2,speed2,gpu_util,gmem_util,gmem\n"


def row(one: str, other: str, speeds: tuple[object, object], gpu: float) -> str:
    return f"{one},d,1,0,{speeds[0]},{other},d,1,0,{speeds[1]},{gpu},20,{CAPACITY_MIB / 2}\n"


def records(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "pairs.csv"
    path.write_text(HEAD + "".join(rows))
    return path


def test_the_least_busy_partner_is_the_fast_one(tmp_path: Path) -> None:
    alike = [row(name, name, (0.9, 0.9), gpu) for name, gpu in (("busy", 100), ("calm", 20), ("half", 60))]
    mixed = [row("busy", "calm", (1.0, 0.9), 0), row("busy", "half", (0.8, 0.7), 0), row("calm", "half", (1.0, 1.0), 0)]
    path = records(tmp_path, *alike, *mixed, row("busy", "gone", ("", ""), 0))
    found = read(path)
    assert found.traits["busy", "d", "1", "0"] == Traits(0.5, 0.1, 0.25)
    assert found.mean_speed(("calm", "d", "1", "0"), ("busy", "d", "1", "0")) == pytest.approx(0.95)
    assert len(found.speeds) == 9
    figures = run_all(path, 300, 1, 1)
    speed = figures["speed"]["1"]["2"]
    assert speed["random"] < speed["least_busy"] <= speed["best"]
    assert figures["searches"].keys() == {"least_busy", "fullest", "by_count"}


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pair of a job with itself"):
        read(records(tmp_path, row("a", "b", (1.0, 1.0), 50)))

"""Trials that share a device by lanes: memory limits packing, and a trial that outgrows its part disturbs no other."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import fluidtune
from tests.tune.running import Recorder, events_of, fit
from tests.tune.trainables import began_at, report_saved

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.timeout(150)]

MB = 1 << 20


def lanes(memory: int = 2 << 30, packing: int = 2) -> fluidtune.FluidExecutor:
    return fluidtune.FluidExecutor(devices="cpu:1", max_packing=packing, lanes="FAIR", device_memory=memory)


def touched(size: int) -> bytearray:
    """Memory that is really there."""
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    return block


def steady(config: dict[str, Any]) -> None:
    """Rewrites a tensor on one core; what it holds is a function of its configuration alone.

    The greedy one allocates until it fails. The others wait for its second attempt half-way.
    """
    import torch

    draw, held, attempts = random.Random(config["x"]), torch.ones(16 * MB // 4), Path(config["attempts"])
    for at in range(config["n"]):
        held.mul_(0.9).add_(draw.random())
        time.sleep(0.05)
        if config["x"] == config["greedy"] and at >= 2:
            with attempts.open("a") as file:
                file.write("x")
            hoard = []
            while True:
                hoard.append(torch.ones(16 * MB // 4))
        while config["greedy"] and at == config["n"] // 2 and (not attempts.exists() or attempts.stat().st_size < 2):
            time.sleep(0.02)
        tune.report({"score": float(held.min() + held.max()), "pid": os.getpid()})


def curves(results: Any) -> dict[int, list[float]]:
    return {result.config["x"]: list(result.metrics_dataframe["score"]) for result in results if not result.error}


@pytest.mark.faults
@pytest.mark.core
@pytest.mark.usefixtures("ray2")
def test_one_that_allocates_until_it_fails_fails_alone(tmp_path: Path) -> None:
    space = {"x": tune.grid_search([1, 2, 3]), "n": 20, "greedy": 0, "attempts": str(tmp_path / "attempts")}
    alone = curves(
        fit("fluid", steady, space, tmp_path / "alone", executor=fluidtune.FluidExecutor(devices="cpu:1"), mode="min")
    )
    assert [len(alone[x]) for x in (1, 2, 3)] == [20] * 3
    results = fit("fluid", steady, {**space, "greedy": 3}, tmp_path, executor=lanes(packing=3), mode="min", fails=1)
    beside = curves(results)
    assert beside[1] == alone[1]
    assert beside[2] == alone[2]
    lacking = events_of(tmp_path, "room_lacking")
    greedy = {event["trial"] for event in lacking}
    assert len(greedy) == 1, "a neighbour was disturbed"
    sizes = [sum(event["memory"]) for event in lacking if "ran out" in event["reason"]]
    assert sizes and sizes == sorted(sizes), "it came back with less"
    ended = {event["trial"]: event["t"] for event in events_of(tmp_path, "trial_ended")}
    assert all(lacking[0]["t"] < t for t in ended.values()), "the others were done before it failed for the first time"
    lost = events_of(tmp_path, "worker_lost")
    assert len(lost) <= len(sizes), lost


def grows(config: dict[str, Any]) -> None:
    """The second trial needs much more from its third iteration on; goes on from its checkpoints.

    The first is there until the second is done.
    """
    start, kept, done = began_at(), [], Path(config["done"])
    for at in range(start + 1, 1000):
        if at > config["n"] and (config["x"] == 2 or done.exists()):
            break
        time.sleep(0.05)
        if config["x"] == 2 and at >= 3 and not kept:
            kept.append(touched(400 * MB))
        report_saved(at, {"score": float(at), "began": start})
    done.touch()


@pytest.mark.core
@pytest.mark.usefixtures("ray2")
def test_one_that_outgrows_its_part_goes_on_from_its_last_checkpoint_with_a_bigger_one(tmp_path: Path) -> None:
    space = {"x": tune.grid_search([1, 2]), "n": 14, "done": str(tmp_path / "done")}
    told = Recorder()
    results = fit("fluid", grows, space, tmp_path, executor=lanes(memory=2400 * MB), run={"callbacks": [told]})
    for x, iterations in told.iterations().items():
        assert iterations == list(range(1, len(iterations) + 1)), f"trial {x} skipped or repeated one"
    by_x = {result.config["x"]: result for result in results}
    assert by_x[1].metrics["began"] == 0
    assert by_x[2].metrics["began"] >= 2, "it began anew instead of at its checkpoint"
    assert by_x[2].metrics["training_iteration"] == 14
    assert {event["trial"] for event in events_of(tmp_path, "room_lacking")} == {by_x[2].metrics["trial_id"]}

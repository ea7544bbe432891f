"""A model as layers, and the processes of its stages without processes: what they keep, drop, answer and refuse."""

from __future__ import annotations

import gc
import json
import math
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ray.tune import Checkpoint
from torch import nn

from fluidtune.serving import service
from fluidtune.serving.loaded_model import Packed
from fluidtune.serving.model_layers import Layer, Stage, as_function, layers_of, writable
from fluidtune.serving.model_process import Loading, ModelProcess, Passed, Started
from fluidtune.serving.running_services import status_text
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError
from symphony_serve.model_side import Batching
from tests.serving import layered

#: Bytes of weights of the layers of `layered.network`.
WEIGHTS = [4 * 9 * 32, 0, 4 * 33 * 32, 0, 4 * 33 * 3]


@pytest.fixture
def winner(tmp_path):
    torch.save(layered.network().state_dict(), tmp_path / "weights.pt")
    return Winner("t", Checkpoint.from_directory(tmp_path), {}, 1.0)


def packed(inputs):
    return list(map(Packed.of, inputs))


def group(winner, count, load=layered.load, room=math.inf, stages=()):
    """The processes of a group that are ready, and what they have said."""
    loading = Loading.of(load, [winner])
    processes = [ModelProcess(loading, number, count, room) for number in range(count)]
    said = Started(stages=stages)
    for one in processes:
        said = one.ready(said)
    return processes, said


def through(processes, inputs):
    batch = Passed(packed(inputs), len(inputs))
    for one in processes:
        batch = one.run(batch)
    return batch


@pytest.mark.parametrize("count", range(2, 6))
def test_any_number_of_stages_answers_bit_by_bit_what_the_whole_model_does(winner, count):
    processes, said = group(winner, count)
    rows = torch.rand(3, 8).tolist()
    whole = through([ModelProcess(Loading.of(layered.load, [winner]))], rows).value
    passed = through(processes, rows)
    assert passed.value == whole and len(passed.seconds) == count
    assert len(said.pids) == count and said.samples.inputs == layered.SAMPLES
    held = [range(one.first, one.end) for one in said.stages]
    assert [layer for part in held for layer in part] == [0, 1, 2, 3, 4]
    assert [one.weights for one in said.stages] == [sum(WEIGHTS[part.start : part.stop]) for part in held]


def test_a_process_drops_the_layers_of_the_other_stages(winner):
    kept = []

    def load(directory, config):
        model = layered.load(directory, config)
        kept.append([weakref.ref(layer) for layer in model])
        return model

    stages = tuple(Stage(first, end, 1.0, 0, 0) for first, end in ((0, 2), (2, 5)))
    # Not pickled: the list is to be this process'.
    loading = SimpleNamespace(environment={}, beside=False, trials=(winner,), function=lambda: load)
    processes = [ModelProcess(loading, number, 2, math.inf) for number in range(2)]
    said = Started(stages=stages)
    for one in processes:
        said = one.ready(said)
    gc.collect()
    assert [[layer() is not None for layer in one] for one in kept] == [
        [True] * 2 + [False] * 3,
        [False] * 2 + [True] * 3,
    ]
    assert said.stages == stages


def test_what_a_layer_needs():
    model = nn.Sequential(nn.Linear(8, 4), nn.Flatten())
    model.samples = [[0.0] * 8] * 3
    found = layers_of(model).measured(model.samples[:1])
    assert [(one.weights, one.activations) for one in found] == [(4 * 36, 4 * 4), (0, 4 * 4)]
    assert all(isinstance(one, Layer) and one.seconds > 0 for one in found)


class Cut:
    """A model that its user has cut, and whose inputs are text."""

    def __init__(self, *stages):
        self.stages, self.samples = list(stages), ["ab", "c"]


def count_letters(texts):
    return [len(text) for text in texts]


def double(numbers):
    return [2 * number for number in numbers]


def load_cut(directory, config):
    return Cut(count_letters, double)


def test_a_model_that_its_user_has_cut(winner):
    processes, said = group(winner, 2, load_cut)
    assert through(processes, ["abc", ""]).value == [(200, "6"), (200, "0")]
    assert [(one.first, one.end, one.weights) for one in said.stages] == [(0, 1, 0), (1, 2, 0)]
    assert through([ModelProcess(Loading.of(load_cut, [winner]))], ["abc"]).value == [(200, "6")]


def test_what_fails_in_a_stage_is_told_at_the_end_and_the_next_stages_leave_it_alone(winner):
    def load(directory, config):
        return Cut(count_letters, lambda numbers: [1 // number for number in numbers], double)

    passed = through(group(winner, 3, load)[0], ["a", ""])
    assert passed.failed[0] == 500
    assert json.loads(passed.failed[1])["error"].startswith("the model failed in stage 1: ZeroDivisionError")
    assert len(passed.seconds) == 1


class Pair(NamedTuple):
    """Of arrays, or what has arrays."""

    one: object
    other: object


def make_arrays(numbers):
    array = np.array(numbers, dtype=float)
    return Pair({"array": array, "again": [array]}, (np.ones(len(numbers)), "text"))


def change_arrays(pair):
    pair.one["array"] += 1
    assert pair.one["again"][0] is pair.one["array"]
    other, text = pair.other
    other *= 2
    assert text == "text"
    return (pair.one["array"] + other).tolist()


def test_a_stage_may_change_what_it_gets_as_in_the_whole_model(winner):
    """Ray hands arrays over read-only, as is done here. Seen: the stage failed ("output array is read-only")."""

    def load(directory, config):
        made = Cut(make_arrays, change_arrays)
        made.samples = [1, 2]
        return made

    (first, second), _ = group(winner, 2, load)
    passed = first.run(Passed(packed([1, 2]), 2))
    arrays = [passed.value.one["array"], passed.value.other[0]]
    for one in arrays:
        one.flags.writeable = False
    assert second.run(passed).value == [(200, "4.0"), (200, "5.0")]
    assert [one.tolist() for one in arrays] == [[1.0, 2.0], [1.0, 1.0]]
    own = np.ones(1)
    assert writable([own])[0] is own


def own_forward(directory, config):
    class Own(nn.Sequential):
        def forward(self, rows):
            return rows

    return Own(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("load", "count", "room", "said"),
    [
        (
            lambda directory, config: len,
            2,
            math.inf,
            "load returned builtin_function_or_method for trial t, which has no",
        ),
        (own_forward, 2, math.inf, "load returned Own for trial t, which has no layers to cut; return a torch.nn.Seq"),
        (layered.load, 6, math.inf, "the model of trial t has 5 layers, and 6 stages are to be made of it; ask for at"),
        (layered.load, 2, 100.0, "5 layers with .* GiB of weights do not fit into 2 stages of .* GiB each; give more"),
        (
            lambda directory, config: Cut(count_letters, lambda numbers: 1 / 0),
            2,
            math.inf,
            "fails with its own samples",
        ),
    ],
)
def test_what_is_not_cut_is_told_in_one_line(winner, load, count, room, said):
    with pytest.raises(ServeError, match=said) as found:
        group(winner, count, load, room)
    assert "\n" not in str(found.value)


def test_a_function_stays_the_function_that_it_is():
    assert as_function(double) is double
    both = Cut(count_letters)
    both.__class__ = type("Called", (Cut,), {"__call__": lambda self, texts: texts})
    assert as_function(both) is both


def test_batches_of_a_model_in_stages_are_formed_by_window():
    assert service._in_stages(2, 1.5, Batching.AUTO, top=False) is Batching.WINDOW
    assert service._in_stages(1, None, Batching.ORLOJ, top=True) is Batching.ORLOJ


def test_status_tells_what_the_stages_hold():
    stages = [Stage(0, 2, 0.0125, 3_000_000, 4096)._asdict(), Stage(2, 5, 0.01, 1_000_000, 12)._asdict()]
    found = {"state": "serving", "why": "", "app": None, "slo_s": 0.2, "device_pids": [7, 8], "devices": 1}
    found |= {"name": "digits", "user": "anna", "url": "http://x:1/", "processes_wanted": 2}
    found |= {"devices_wanted": 1, "unanswered": 0, "seconds": 9.0, "trials": [], "stages": [stages]}
    assert status_text(found).splitlines()[1:] == [
        "serving: SLO 200 ms, 1 device with 2 of 2 processes, 0 requests wait, 9 s",
        "  group 0, stage 0: layers 0 to 1, 12.5 ms, 3 of 4 MB of weights, 4.096 kB out",
        "  group 0, stage 1: layers 2 to 4, 10.0 ms, 1 of 4 MB of weights, 0.012 kB out",
    ]

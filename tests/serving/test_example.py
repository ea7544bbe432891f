"""examples/serve_digits.py: what it loads answers. No Ray."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from ray.tune import Checkpoint

from benchmarks.common import ROOT
from fluidtune.serving.loaded_model import Packed
from fluidtune.serving.model_process import Loading, ModelProcess, Passed
from fluidtune.serving.winners import Winner


@pytest.mark.slow
def test_the_example_loads_a_checkpoint_of_the_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "examples")])
    import serve_digits

    network = serve_digits.network(4)
    torch.save({"model": network.state_dict()}, tmp_path / "state.pt")
    winner = Winner("t", Checkpoint.from_directory(tmp_path), {"width": 4}, 0.5)
    process = ModelProcess(Loading.of(serve_digits.load, [winner]))
    images = serve_digits.digits()[1].tensors[0][:3]
    expected = network(images).argmax(1).tolist()
    outcomes = process.run(Passed([Packed.of(image) for image in images[:, 0].tolist()], 3)).value
    assert [(status, json.loads(text)["digit"]) for status, text in outcomes] == [(200, digit) for digit in expected]

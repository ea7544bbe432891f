"""What is read of the models of a service of several, and what is wrong with it; and what a process has of them."""

from __future__ import annotations

import pytest

from fluidtune.errors import FluidTuneError
from fluidtune.serving.placed_models import placed_models
from fluidtune.serving.service import loader

FILE = """
[[models]]
name = "ranker"
checkpoint = "weights"
load = "tests.serving.runs:load"
slo = 0.5
rate = 12.0
cv = 4.0
bytes = 2e9

[[models]]
name = "reader"
checkpoint = "weights"
load = "tests.serving.runs:load"
slo = 2.0
trace = "trace.txt"
weight = 2.0
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "factor.json").write_text("3")
    (tmp_path / "trace.txt").write_text("1 2 3 4")
    (tmp_path / "models.toml").write_text(FILE)
    return tmp_path / "models.toml"


def test_the_models_of_a_file(file):
    models, chosen, directory = placed_models(file, loader, 4e9)
    assert [(one.name, one.slo, one.rate, one.cv, one.weight, one.bytes) for one in models] == [
        ("ranker", 0.5, 12.0, 4.0, 1.0, 2e9),
        ("reader", 2.0, 1.0, 0.0, 2.0, None),
    ]
    assert [(one.name, one.config, bool(one.load)) for one in chosen] == [("ranker", {}, True), ("reader", {}, True)]
    assert directory == str(file.parent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("ranker", "reader"), "has two models named 'reader'"),
        (('load = "tests.serving.runs:load"\nslo = 0.5', "slo = 0.5"), "model ranker has no `load`; give load"),
        (("tests.serving.runs:load", "tests.serving.runs:lode"), "model ranker: load .*has no attribute 'lode'"),
        (('"ranker"', '"a/b"'), "cannot be asked at a path of this name; use letters"),
        (('"ranker"', '"metrics"'), "cannot be asked at a path of this name"),
        (('"ranker"', '".."'), "cannot be asked at a path of this name"),
        (("tests.serving.runs:load", "broken:load"), "load 'broken:load': SyntaxError"),
        (('checkpoint = "weights"', 'run = "weights"'), "model ranker: .*; here: give `trial`"),
        (('"weights"', '"elsewhere"'), "model ranker has the checkpoint .*elsewhere', which is no directory"),
        (("2e9", "5e9"), "model ranker has 4.66 GiB and a device 3.73 GiB, so it fits none; give larger devices"),
        (("weight = 2.0", "run = 'r'"), "model reader has both `run` and `checkpoint`; give one of them"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(file, change, said, monkeypatch):
    (file.parent / "broken.py").write_text("def load(:")
    monkeypatch.syspath_prepend(file.parent)
    file.write_text(FILE.replace(*change, 1))
    with pytest.raises(FluidTuneError, match=said) as refused:
        placed_models(file, loader, 4e9)
    assert "\n" not in str(refused.value)

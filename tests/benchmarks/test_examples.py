"""The examples: stock ones do not mention FluidTune, and an elastic one differs from its stock one by three lines."""

import contextlib
import difflib
import importlib.util
from types import SimpleNamespace

import pytest

from benchmarks.common import ROOT

EXAMPLES = ROOT / "examples"
#: Stock and elastic; and a small configuration with the metric, and the least it comes to.
TASKS = [("images_hyperband", "images_elastic"), ("words_asha", "words_elastic"), ("dcgan_pbt", "dcgan_elastic")]
SMALL = {
    "images": dict(
        channels=8, convolutions=3, hidden=32, lr=0.05, momentum=0.9, weight_decay=1e-4, batch_size=64, cifar=None
    ),
    "words": dict(
        cell="gru",
        layers=1,
        embedding=16,
        hidden=16,
        lr=1e-2,
        batch_size=32,
        window=16,
        dropout=0.1,
        clip=1.0,
        weight_decay=1e-4,
        text=None,
    ),
    "dcgan": {"channels": 8, "maker_lr": 2e-3, "judge_lr": 1e-3},
}


@pytest.mark.parametrize("name", ["digits_hyperband", "digits_asha", *(stock for stock, _ in TASKS)])
def test_stock_examples_import_nothing_of_ours(name):
    code = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2]
    assert "fluidtune" not in code.lower()


@pytest.mark.parametrize("stock, elastic", [("digits_hyperband", "digits_elastic"), *TASKS])
def test_an_elastic_example_changes_three_lines_of_code(stock, elastic):
    def code(name):
        # The file's name is also the name of the experiment, and differs.
        text = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2].replace(name, "NAME")
        return [line for line in text.splitlines() if line.strip()]

    changes = difflib.ndiff(code(stock), code(elastic))
    added = [line for line in changes if line.startswith("+ ")]
    assert len(added) == 3
    assert all(line.endswith("# elastic") for line in added)


class FakeTune(SimpleNamespace):
    """The functions of Ray Tune that a loop calls, without Ray. ``keep``: the directory for checkpoints."""

    def __init__(self, keep, resume=None):
        self.reports, self.keep, self.resume = [], keep, resume

    def get_checkpoint(self):
        return self.resume

    def report(self, metrics, checkpoint):
        self.reports.append(metrics)
        with checkpoint.as_directory() as directory:
            (self.keep / "state.pt").write_bytes((type(self.keep)(directory) / "state.pt").read_bytes())


def looped(name, config, keep, resume=None):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Use a part of the data.
    if name.startswith("words"):
        words = module.words
        module.words = lambda text: words(text)[:4000]
    else:
        load = module.load_digits
        module.load_digits = lambda return_X_y: tuple(part[:800] for part in load(return_X_y=return_X_y))
    module.tune = FakeTune(keep, resume)
    module.train(config)
    return module.tune.reports


@pytest.mark.parametrize("stock, elastic", TASKS)
def test_a_task_learns_alike_in_both_forms_and_goes_on_from_its_checkpoint(stock, elastic, tmp_path, one_thread):
    config = SMALL[stock.split("_")[0]]
    whole = looped(stock, {**config, "epochs": 2}, tmp_path)
    assert len(whole) == 2
    if stock == "dcgan_pbt":
        assert all(1.0 <= one["score"] <= 10.0 for one in whole)
    else:
        assert whole[1]["loss"] < whole[0]["loss"]
    begun = looped(elastic, {**config, "epochs": 1}, tmp_path)
    resume = SimpleNamespace(as_directory=lambda: contextlib.nullcontext(tmp_path))
    assert [*begun, *looped(elastic, {**config, "epochs": 2}, tmp_path, resume)] == whole

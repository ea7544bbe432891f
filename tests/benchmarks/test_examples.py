"""The examples: two know nothing of FluidTune, the third differs from the first by five lines of its loop."""

import difflib

import pytest

from benchmarks.common import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["digits_hyperband.py", "digits_asha.py"])
def test_stock_examples_import_nothing_of_ours(name):
    code = (EXAMPLES / name).read_text().split('"""', 2)[2]
    assert "fluidtune" not in code.lower()


def test_the_elastic_example_changes_five_lines_of_code():
    def code(name):
        # The name of the experiment is the file's.
        text = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2].replace(name, "NAME")
        return [line for line in text.splitlines() if line.strip()]

    changes = difflib.ndiff(code("digits_hyperband"), code("digits_elastic"))
    added = [line for line in changes if line.startswith("+ ")]
    assert len(added) == 5
    assert all(line.endswith("# elastic") for line in added)

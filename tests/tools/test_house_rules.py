"""The house rules, on small trees that break one rule each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.house_rules import check_columns, check_paths, check_python, check_tree

ROOT = Path(__file__).parents[2]
PAGE, MODULE = Path("page.md"), Path("module.py")
LONG = "word " * 21  # 105 columns


def broken(findings) -> list[int]:
    return [finding.line for finding in findings]


@pytest.mark.parametrize(
    "text, lines",
    [
        (f"short\n{'x' * 101}\n", [2]),
        (f"| {LONG} | {LONG} |\n", []),
        (f"```sh\n{LONG}\n```\n{LONG}\n", [4]),
        (f"See [the page](https://example.org/{'x' * 100}) for more.\n", []),
        (f"{LONG} https://example.org/\n", [1]),
    ],
)
def test_wide_lines_of_markdown(text: str, lines: list[int]) -> None:
    assert broken(check_columns(PAGE, text)) == lines


@pytest.mark.parametrize(
    "text, found",
    [
        ("[here](../README.md#a-tree), [there](https://a.b/c), [this](#its-c_1-what)\n## Its `c_1`: what?", []),
        ("[gone](../GONE.md)", ["../GONE.md"]),
        ("[here](../README.md#start), [this](#part)\n```\n# part\n```", ["../README.md#start", "#part"]),
        ("[included](more/copy.md#a-tree), [not](more/copy.md#head)", ["more/copy.md#head"]),
        ("`pytest tests/a.py -k b` and `fluidtune/a/gone`", ["tests/a.py", "fluidtune/a/gone"]),
        ("`a/b` of `n/a`, and fluidtune/gone.py without a code span", []),
    ],
)
def test_paths_of_markdown_that_lead_nowhere(tree: Path, text: str, found: list[str]) -> None:
    findings = list(check_paths(tree / "docs/page.md", text, tree))
    assert len(findings) == len(found)
    assert all(name in finding.text for name, finding in zip(found, findings, strict=True))


def a_class(methods: int, base: str = "", docstring: str = "Is.") -> str:
    body = "".join(f"    def m{number}(self): ...\n" for number in range(methods))
    return f'"""A file."""\nclass Many{base}:\n    """{docstring}"""\n{body}    def _own(self): ...\n'


@pytest.mark.parametrize(
    "text, lines",
    [
        (a_class(12), []),
        (a_class(13), [2]),
        (a_class(13, "(abc.ABC)"), [2]),
        (a_class(13, "(Callback)"), []),
        (a_class(13, docstring="Is. One thing: each method is one message."), []),
        ('"""A file."""\nclass A:\n    def _(self):\n        pass\n', [3]),
        ("import os\n", [1]),
        ("", []),
    ],
)
def test_files_without_a_first_sentence_large_classes_and_functions_without_a_name(text: str, lines: list[int]) -> None:
    assert broken(check_python(MODULE, text)) == lines


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("fluidtune/a", "fluidtune/b", "themis_bridge", "salus_share", "docs"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("fluidtune/a/messages", "fluidtune/b/messages", "fluidtune/a/shared", "themis_bridge/shared"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "README.md").write_text("# A tree\n")
    (tmp_path / "docs/more").mkdir()
    (tmp_path / "docs/more/copy.md").write_text("```{include} ../../README.md\n```\n")
    return tmp_path


def run(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.house_rules"]
    return subprocess.run(command, cwd=root, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_two_modules_of_one_name_in_one_package(tree: Path) -> None:
    (tree / "fluidtune/b/shared.py").touch()
    (finding,) = check_tree(tree)
    assert finding.path == Path("fluidtune/b/shared.py") and "fluidtune/a/shared.py" in finding.text


def test_a_mark_that_the_makefile_does_not_find(tree: Path) -> None:
    (tree / "tests").mkdir(exist_ok=True)
    for name in ("contract.py", "test_contract.py"):
        (tree / "tests" / name).write_text("import pytest\n\npytestmark = pytest.mark.ray\n")
    (finding,) = check_tree(tree)
    assert finding[:2] == (Path("tests/contract.py"), 3) and "mark.ray" in finding.text


def test_findings_are_printed_with_their_place(tree: Path) -> None:
    (tree / "docs/page.md").write_text(f"# A page\n\n{LONG}\n")
    (tree / "salus_share/lanes.py").write_text("import os\n")
    done = run(tree)
    assert done.returncode == 1
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == ["docs/page.md:3:", "salus_share/lanes.py:1:"]

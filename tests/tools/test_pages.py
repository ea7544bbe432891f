"""The pages of the documentation say what the code says, and the index leads to each of them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

from fluidtune.cli import cli, run
from fluidtune.tune.executor import FluidExecutor
from tools.house_rules import PACKAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMANDS = "reference/command-line.md"
#: Issue 43: a newcomer's ten questions, and ten more.
QUESTIONS = 20


def page(name: str) -> str:
    return (DOCS / name).read_text()


def first_cells(text: str) -> list[str]:
    """The code span that begins each row of the tables of a page."""
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


@cache
def texts() -> list[str]:
    """All texts in the code that users install; a value in a text is left out, as \\0."""
    found = []
    for module in (module for package in PACKAGES for module in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(getattr(part, "value", "")) for part in map(constant, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def constant(part: ast.expr) -> ast.Constant:
    return part if isinstance(part, ast.Constant) else ast.Constant("\0")


def test_the_settings_are_those_of_the_executor_and_of_the_command():
    rows = re.findall(r"^\| `(\w+)` \| `--([\w-]+)`", page("reference/settings.md"), re.MULTILINE)
    assert {name for name, _ in rows} == {field.name for field in fields(FluidExecutor)}
    options = {
        name for option in run.params for name in [*option.opts, *option.secondary_opts] if name.startswith("--")
    }
    assert {f"--{option}" for _, option in rows} <= options


def test_the_table_of_commands_has_all_of_them():
    listed = set(re.findall(r"`([a-z ]+)`", " ".join(re.findall(r"^\| (`[^|]+)\|", page(COMMANDS), re.MULTILINE))))
    assert listed == {
        f"{name} {inner}" if isinstance(command, click.Group) else name
        for name, command in cli.commands.items()
        for inner in getattr(command, "commands", [""])
    }


@pytest.mark.parametrize("message", first_cells(page("how-to/troubleshooting.md")))
def test_a_message_of_the_page_is_one_of_the_code(message):
    assert any(message in text for text in texts())


def made(*folders: str) -> dict[str, tuple[str, str]]:
    """The metrics in ``ray.util.metrics`` that the modules of these folders make: name -> kind, and the call's text."""
    code = "".join(module.read_text() for folder in folders for module in (ROOT / folder).glob("*.py"))
    calls = re.findall(r'\b(Gauge|Counter)\(\s*"(\w+)"((?:[^()]|\([^()]*\))*)\)', code)
    return {name: (kind, rest) for kind, name, rest in calls}


def test_the_metrics_are_those_of_the_code():
    assert sorted(first_cells(page("reference/metrics.md"))) == sorted(made("fluidtune/tune", "themis_bridge/shell"))


def test_the_dashboard_has_each_metric_of_the_code_with_the_labels_that_it_has():
    """Ray puts `ray_` before each name, and `_total` behind that of a counter."""
    code = made("fluidtune/tune", "themis_bridge/shell", "fluidtune/serving")
    by_trial = {"service", "trial", "version"}  # `ServingGauges` has a name for them
    labels = {
        f"ray_{name}{'_total' if kind == 'Counter' else ''}": set(re.findall(r'"(\w+)"', rest))
        | (by_trial if "by_trial" in rest else set())
        for name, (kind, rest) in code.items()
    }
    # Prometheus has these labels itself, and renames ours.
    assert not {"job", "instance"} & set().union(*labels.values())
    shown = []
    for panel in json.loads(page("operations/grafana.json"))["panels"]:
        for target in panel.get("targets", ()):
            (name,) = re.findall(r"\bray_\w+", target["expr"])
            used = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            used += [label for one in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for label in one.split(", ")]
            assert set(used) <= labels.get(name, set()), name
            shown.append(name)
    assert sorted(shown) == sorted(labels)


def test_the_site_runs_every_example_but_long_ones_and_those_that_need_a_framework():
    conf = page("conf.py")
    framework = re.compile(r"^(import|from) (fluidtune\.elastic|lightning|transformers)", re.MULTILINE)
    for example in (ROOT / "examples").glob("*.py"):
        left_out = re.match("(dcgan|images|words)_", example.name) or framework.search(example.read_text())
        assert bool(re.search(rf"\b{example.stem}\b", conf)) is (left_out is None), example.name


def test_the_index_leads_to_every_page():
    lists = re.findall(r"```\{toctree\}\n(.*?)```", page("index.md"), re.DOTALL)
    entries = [line for text in lists for line in text.splitlines() if line and not line.startswith(":")]
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    assert sorted(entries) == sorted(pages - {"index"})


def test_questions_have_answers():
    sections = re.split(r"^## (.+\?)$", page("questions.md"), flags=re.MULTILINE)
    assert len(sections[1::2]) >= QUESTIONS
    assert all(answer.strip() for answer in sections[2::2])


@pytest.mark.parametrize(
    "path", [*sorted((DOCS / "how-to").glob("*.md")), *sorted((DOCS / "coming-from").glob("*.md"))]
)
def test_a_how_to_page_is_short(path):
    assert len(path.read_text().splitlines()) <= 120


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120

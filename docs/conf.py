"""The settings of Sphinx for the documentation site: `make docs` builds it, strictly, into docs/_build/html."""

import os
import re
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import ray

import fluidtune

project = "FluidTune"
author = "The FluidTune authors"
copyright = "The FluidTune authors"
version = release = fluidtune.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinxcontrib.mermaid",
    "sphinx_llms_txt",
    "sphinx_gallery.gen_gallery",
]
root_doc = "index"
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"FluidTune {release}"

# Headings get the anchors that GitHub gives them, so that a link works in both places.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# A name in single backticks in a docstring is code.
default_role = "code"
autosummary_generate = True
# A package says by its __all__ which of its names are public, wherever they are defined.
autosummary_imported_members = True
autosummary_ignore_module_all = False
# Public name -> the examples, and the pages with code, that use it: (text, page).
DOCS = Path(__file__).parent
PACKAGES = {"fluidtune": "fluidtune", "elastic": "fluidtune.elastic"}
used_in = defaultdict(list)
for path in [*sorted(DOCS.parent.glob("examples/*.py")), *sorted(DOCS.rglob("*.md"))]:
    code = path.read_text()
    text, where = path.name, f"gallery/{path.stem}"
    if path.suffix == ".md":
        text, where = code.partition("\n")[0].lstrip("# "), str(path.relative_to(DOCS).with_suffix(""))
        code = "".join(re.findall(r"^```python\n(.*?)^```", code, re.DOTALL | re.MULTILINE))
    names = {f"{PACKAGES[package]}.{name}" for package, name in re.findall(r"\b(fluidtune|elastic)\.(\w+)", code)}
    for package, listed in re.findall(r"^from (fluidtune[\w.]*) import ([\w, ]+)", code, re.MULTILINE):
        names |= {f"{package}.{name.strip()}" for name in listed.split(",")}
    for name in names:
        used_in[name].append((text, where))
autosummary_context = {"used_in": dict(used_in)}
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# What has no docstring of ours says nothing here: Ray's own refer to Ray's site.
autodoc_inherit_docstrings = False
# The build runs these examples, with these options. Others take minutes, or need a framework.
RESULTS = Path(tempfile.gettempdir(), f"fluidtune-docs-{os.getpid()}")
OPTIONS = {
    "forked_actors": (),
    "serve_digits": (str(RESULTS / "digits_elastic"), "--metric", "accuracy"),
    "two_tenants": (
        *("--name", "first", "--address", "local", "--trials", "4", "--iterations", "4"),
        *("--storage", str(RESULTS)),
    ),
}
FEW = ("--samples", "4", "--epochs", "3", "--storage", str(RESULTS))
OPTIONS |= dict.fromkeys(("digits_asha", "digits_elastic", "digits_hyperband", "digits_train"), FEW)


# A page needs a title, and marks of what is code. That of an example is its name; commands are indented.
TITLED = DOCS / "_build" / "examples"
shutil.rmtree(TITLED, ignore_errors=True)
shutil.copytree(DOCS.parent / "examples", TITLED, ignore=shutil.ignore_patterns("__pycache__"))
for path in TITLED.glob("*.py"):
    said, rest = path.read_text().removeprefix('"""').split('"""', 1)
    said = said.replace(".\n\n    ", ":\n\n    ").replace(":\n\n    ", "::\n\n    ")
    path.write_text(f'"""{path.name}\n{"=" * len(path.name)}\n\n{said}"""{rest}')


def options(_, script_vars):
    return list(OPTIONS.get(Path(script_vars["src_file"]).stem, ()))


def end_ray(*_):
    """Each example has a cluster of its own."""
    ray.shutdown()


def remove_results(*_):
    shutil.rmtree(RESULTS, ignore_errors=True)


def setup(app):
    app.connect("build-finished", remove_results)


os.environ["RAY_ADDRESS"] = "local"
suppress_warnings = ["config.cache"]  # functions are no values to keep from one build to the next
sphinx_gallery_conf = {
    "examples_dirs": str(TITLED),
    "gallery_dirs": "gallery",
    "filename_pattern": rf"/({'|'.join(OPTIONS)})\.py$",
    "reset_argv": options,
    "reset_modules": (end_ray,),
    "reset_modules_order": "both",
    "within_subsection_order": "FileNameSortKey",  # serve_digits serves what digits_elastic has found
    "abort_on_example_error": True,
    "default_thumb_file": str(DOCS / "pictures" / "timeline.png"),
    # A notebook's own process has other arguments.
    "first_notebook_cell": "import sys\n\nsys.argv = sys.argv[:1]  # here the script's options may follow, as texts",
    "show_memory": False,
}
# Types of other projects have no page here.
nitpick_ignore_regex = [(r"py:.*", r".*")]

llms_txt_title = "FluidTune"
llms_txt_summary = (
    "Runs Ray Tune scripts unedited: forked processes, trials that share a GPU and grow over several as they train, a "
    "fair share for each job of a cluster, the best trial as a service. One GPU has run it. Agents: read `agents`."
)
# Pages of public names are made from docstrings: their sources say nothing.
llms_txt_exclude = ["reference/api/*"]

"""Finds code outside `fluidtune.ray_compat` that reaches past Ray's public API.

``python -m tools.ray_boundary`` reads every Python file of the project, prints each such access with its place, and
exits with 1 if there is one. It reads source only and imports neither Ray nor the project. It reports:

- an import or a dotted path of a Ray module that is not in `PUBLIC_MODULES`, or with a private name in it;
- a string that names such a module;
- a private attribute, by a dot, by ``getattr`` and its like or through ``vars`` and ``__dict__``, that no class of the
  same file defines. On ``self`` and ``cls`` a class of any file may define it, because a base class may be elsewhere;
- on anything but ``self`` and ``cls``, a private attribute that `fluidtune.ray_compat` lists as Ray's, always.

A private name begins with one underscore. The attributes of modules of other libraries are not looked at. Tests look
into objects of other files of ours, so that a private attribute in a test need only be defined anywhere in the project.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("fluidtune", "themis_bridge", "salus_share", "symphony_serve", "benchmarks", "examples", "tools", "tests")
#: The boundary itself, its tests, and the test of this tool, which names what is forbidden.
NOT_READ = ("fluidtune/ray_compat/", "tests/ray_compat/", "tests/tools/test_ray_boundary.py")

TESTS = ("tests/",)

#: Ray's modules whose names are documented, or marked as PublicAPI or DeveloperAPI where they are defined.
PUBLIC_MODULES = frozenset(
    {
        "ray",
        "ray.actor",
        "ray.air.integrations.wandb",
        "ray.cloudpickle",
        "ray.cluster_utils",
        "ray.data",
        "ray.exceptions",
        "ray.experimental.tqdm_ray",
        "ray.serve",
        "ray.serve.deployment",
        "ray.train",
        "ray.train.torch",
        "ray.train.lightning",
        "ray.train.v2.api.data_parallel_trainer",
        "ray.tune",
        "ray.tune.experiment",
        "ray.tune.integration.lightgbm",
        "ray.tune.integration.pytorch_lightning",
        "ray.tune.integration.ray_train",
        "ray.tune.integration.xgboost",
        "ray.tune.schedulers",
        "ray.tune.schedulers.pb2",
        "ray.tune.search",
        "ray.tune.search.bohb",
        "ray.tune.search.optuna",
        "ray.tune.search.sample",
        "ray.tune.stopper",
        "ray.tune.trainable",
        "ray.tune.utils.serialization",
        "ray.util",
        "ray.util.metrics",
        "ray.util.placement_group",
        "ray.util.scheduling_strategies",
    }
)

#: (file, name) -> why this access is allowed where it is.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("fluidtune/elastic/divided/torch_private.py", "_call_impl"): "torch's: a call of a module with its hooks",
    ("fluidtune/elastic/divided/torch_private.py", "_compiled_call_impl"): "torch's: what answers a module's calls",
    ("fluidtune/elastic/divided/torch_private.py", "_parameters"): "torch's: where a module has its parameters",
    ("fluidtune/elastic/divided/torch_private.py", "_modules"): "torch's: where a module has its modules",
    ("fluidtune/elastic/divided/torch_private.py", "_buffers"): "torch's: where a module has its buffers",
    ("fluidtune/elastic/divided/torch_private.py", "_version"): "torch's: the writes in place of a tensor",
    ("fluidtune/elastic/divided/torch_private.py", "_schema"): "torch's: the arguments of an operation",
    ("fluidtune/elastic/data/loaders.py", "_get_iterator"): "torch's: starts the processes of a DataLoader",
    ("fluidtune/elastic/data/loaders.py", "_iterator"): "torch's: the processes of a DataLoader that persist",
    ("tests/conftest.py", "_fixtureinfo"): "pytest's: the fixtures of a test, which have no public reader",
    ("tests/elastic/test_commits.py", "_metadata"): "torch's: what a state_dict carries beside its entries",
    ("tests/elastic/restarts.py", "_iterator"): "torch's: the processes of a DataLoader that persist",
    ("tests/elastic/restarts.py", "_shutdown_workers"): "torch's: ends the processes of a DataLoader",
}

#: collections.namedtuple documents these; the underscore keeps them apart from its fields.
PUBLIC_NAMES = frozenset({"_asdict", "_field_defaults", "_fields", "_make", "_replace"})

_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


@dataclass(frozen=True)
class Access:
    """One access: the line, the dotted path or the attribute, and what is wrong with it."""

    line: int
    name: str
    why: str


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC_NAMES


def definitions(source: str) -> frozenset[str]:
    """Return the private names that the classes of a file define: in their bodies, or by assigning to ``self``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    found.add(line.name)
                elif isinstance(line, ast.Assign | ast.AnnAssign):
                    targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                    found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own(node.value):
            found.add(node.attr)
    return frozenset(name for name in found if private(name))


def listed_names(source: str) -> frozenset[str]:
    """Return the private attributes that the list in `fluidtune.ray_compat` names."""
    text = ast.get_docstring(ast.parse(source)) or ""
    names = re.findall(r"``\w+\.(\w+)``", text)
    return frozenset(name for name in names if private(name))


def accesses(
    source: str, defined_elsewhere: frozenset[str] = frozenset(), rays: frozenset[str] = frozenset(), test: bool = False
) -> list[Access]:
    """Return the accesses of one file.

    ``defined_elsewhere``: private names that classes of other files define. ``rays``: attributes that are Ray's in any
    case. ``test``: the file may look into objects of other files.
    """
    reader = _Reader(ast.parse(source), definitions(source), defined_elsewhere, rays, test)
    return sorted(set(reader.read()), key=lambda access: (access.line, access.name))


def project_accesses(root: Path = ROOT) -> Iterator[tuple[str, Access]]:
    """Return the accesses of all files of the project, each with its file, and every exception that is not needed."""
    sources = {
        path.relative_to(root).as_posix(): path.read_text()
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }
    rays = listed_names(sources["fluidtune/ray_compat/__init__.py"])
    defined = frozenset().union(*(definitions(source) for source in sources.values()))
    unused = set(EXCEPTIONS)
    for file, source in sources.items():
        if file.startswith(NOT_READ):
            continue
        for access in accesses(source, defined, rays, test=file.startswith(TESTS)):
            if (file, access.name) in EXCEPTIONS:
                unused.discard((file, access.name))
            else:
                yield file, access
    for file, name in sorted(unused):
        yield file, Access(0, name, "is in the table of exceptions, and the file does not use it")


class _Reader:
    """Reads one file's syntax tree."""

    def __init__(
        self, tree: ast.Module, own: frozenset[str], elsewhere: frozenset[str], rays: frozenset[str], test: bool
    ):
        self._tree = tree
        self._own, self._elsewhere, self._rays, self._test = own, elsewhere, rays, test
        #: Local name -> the dotted path that it was imported from.
        self._imported: dict[str, str] = {}

    def read(self) -> Iterator[Access]:
        for node in ast.walk(self._tree):
            for path, name in _imports(node):
                self._imported[name] = path
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                yield from _paths(node, (alias.name for alias in node.names))
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield from _paths(node, (f"{node.module}.{alias.name}" for alias in node.names))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"ray(\.\w+)+", node.value):
                    yield from _paths(node, [node.value])
            elif isinstance(node, ast.Attribute):
                yield from self._attribute(node, node.value, node.attr)
            elif isinstance(node, ast.Subscript):
                yield from self._subscript(node)
            elif isinstance(node, ast.Call):
                yield from self._call(node)

    def _attribute(self, node: ast.expr, of: ast.expr, name: str) -> Iterator[Access]:
        path = self._path(of)
        if path is not None and path.split(".")[0] == "ray":
            yield from _paths(node, [f"{path}.{name}"])
        elif private(name) and not self._allowed(of, path, name):
            yield Access(node.lineno, name, "is a private attribute that no class of this file defines")

    def _allowed(self, of: ast.expr, path: str | None, name: str) -> bool:
        if _own(of):
            return name in self._own or name in self._elsewhere
        if path is not None and (path.split(".")[0] not in FOLDERS or _is_file(path)):
            return True  # of another library's module, or of a module of ours
        return name not in self._rays and (name in self._own or (self._test and name in self._elsewhere))

    def _subscript(self, node: ast.Subscript) -> Iterator[Access]:
        key, value = node.slice, node.value
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            return
        if isinstance(value, ast.Attribute) and value.attr == "__dict__":
            yield from self._attribute(node, value.value, key.value)
        elif isinstance(value, ast.Call) and _name(value.func) == "vars" and value.args:
            yield from self._attribute(node, value.args[0], key.value)

    def _call(self, node: ast.Call) -> Iterator[Access]:
        texts = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args]
        if _name(node.func) in _BY_NAME and len(texts) > 1 and isinstance(texts[1], str):
            yield from self._attribute(node, node.args[0], texts[1])
        elif _name(node.func) == "attrgetter":
            for text in texts:
                for part in text.split(".") if isinstance(text, str) else ():
                    yield from self._attribute(node, node, part)

    def _path(self, node: ast.expr) -> str | None:
        """The dotted path of a name or attribute that begins with something imported, else None."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id)
        if isinstance(node, ast.Attribute):
            path = self._path(node.value)
            return None if path is None else f"{path}.{node.attr}"
        return None


def _is_file(path: str) -> bool:
    return (ROOT / path.replace(".", "/")).with_suffix(".py").is_file()


def _own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _name(node: ast.expr) -> str:
    """The last name of what is called."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(dotted path, local name) of what an import statement binds."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.name, alias.asname) if alias.asname else (alias.name.split(".")[0],) * 2
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for alias in node.names:
            yield f"{node.module}.{alias.name}", alias.asname or alias.name


def _paths(node: ast.stmt | ast.expr, paths: Iterable[str]) -> Iterator[Access]:
    for path in paths:
        parts = path.split(".")
        if parts[0] != "ray":
            continue
        if any(private(part) for part in parts):
            yield Access(node.lineno, path, "is private")
        elif _module_of(path) not in PUBLIC_MODULES:
            yield Access(node.lineno, path, "is in no module of PUBLIC_MODULES")


@functools.cache
def _module_of(path: str) -> str:
    """The longest beginning of a dotted path that is a module of the installed Ray."""
    found = importlib.util.find_spec("ray")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("ray_boundary: Ray must be installed, its modules are told from its functions by their files")
    place, module = Path(found.submodule_search_locations[0]), ["ray"]
    for part in path.split(".")[1:]:
        place /= part
        if not place.is_dir() and not place.with_suffix(".py").is_file():
            break
        module.append(part)
    return ".".join(module)


def main() -> int:
    found = list(project_accesses())
    for file, access in found:
        print(f"{file}:{access.line}: {access.name} {access.why}")
    if found:
        print("Ray's private side is for fluidtune/ray_compat only: add a function there, and an entry to its list.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

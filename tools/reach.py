"""Finds shipped code that nothing reaches which a user can start.

``python -m tools.reach`` reads the packages that users install, and imports nothing. It begins at `ENTRY_POINTS` and
follows imports, those within functions too, and uses of names:

- A module is reached when a reached module imports it, or when a string of reached code names it, as in ``python -m``
  or the table of a package that imports its parts when they are asked for.
- A function, a class or a constant of a module is reached when reached code uses its name. An import alone is no use.
- A method is reached when its class is, and reached code has an attribute of this name anywhere, or a string that is
  this name. A method is also reached where its class derives from a class of another project, which may call it,
  and where its class is an entry point. What holds for methods of classes holds for the names of a module that
  is handed on as an object.

Attributes are not told apart by the type of their object. So what is printed is unreached, but not all that is
unreached is printed.

`NOT_ATTACHED_YET` is printed apart. The rest is printed with its lines; the
command fails if that is more than `MOST_LINES`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tools.house_rules import PACKAGES

ROOT = Path(__file__).parents[1]
#: Issue O: as many unreached lines may be shipped.
MOST_LINES = 400
#: Where users begin -> the page that says so. "module": what runs when it is imported, or started as a program;
#: "module:name": this name; "module:*": the names of its ``__all__``.
ENTRY_POINTS = {
    "fluidtune.__main__:main": "pyproject.toml",
    "fluidtune.__main__": "README.md",
    "fluidtune:*": "README.md",
    "fluidtune.elastic:*": "CONTRIBUTING.md",
    "fluidtune.planning:*": "CONTRIBUTING.md",
    "themis_bridge:*": "CONTRIBUTING.md",
    "salus_share:*": "CONTRIBUTING.md",
    "symphony_serve:*": "CONTRIBUTING.md",
    "fluidtune.report.measured:measure": "docs/emulated.md",
    "fluidtune.report:read_events": "docs/events.md",
}
#: Classes of ours that others call by the names of their own classes -> who does.
CALLED_BY_OTHERS = {
    "fluidtune.ray_compat.controller:ActorManager": "Ray Tune's controller",
    "fluidtune.cluster.hosting.worker:Worker": "Ray Tune, as it calls a Trainable",
    "fluidtune.serving.front:Front": "uvicorn, as an ASGI application",
    "fluidtune.serving.door:Connection": "uvicorn and httptools",
}
#: Modules that later issues attach to what users start -> which issue.
NOT_ATTACHED_YET: dict[str, str] = {}

#: The table of a package that imports its parts when they are asked for: name -> module.
LAZY = "_HOMES"
_MODULE_IN_TEXT = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+(?::\w+)?")
_IDENTIFIER = re.compile(r"[a-z_]\w*$", re.IGNORECASE)
#: Bases whose own code calls no method of a class that derives from them, but for those with two underscores.
_QUIET_BASES = {"ABC", "Enum", "Exception", "Generic", "IntEnum", "NamedTuple", "Protocol", "RuntimeError", "TypedDict"}
#: Decorators that do not hand the function to anybody.
_QUIET_DECORATORS = {
    "abstractmethod",
    "cache",
    "cached_property",
    "classmethod",
    "contextmanager",
    "dataclass",
    "lru_cache",
    "overload",
    "property",
    "runtime_checkable",
    "setter",
    "staticmethod",
    "total_ordering",
    "wraps",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Target:
    """What an imported or used name stands for: a module, or a name of a module."""

    module: str
    name: str = ""


@dataclass
class Module:
    """One file: its names, what it imports, and what runs when it is imported or started."""

    name: str
    path: Path
    tree: ast.Module
    #: Name -> the statements that define it.
    names: dict[str, list[ast.stmt]] = field(default_factory=lambda: defaultdict(list))
    imports: dict[str, Target] = field(default_factory=dict)
    #: Modules whose import is part of this one's.
    imported: list[Target] = field(default_factory=list)
    runs: list[ast.AST] = field(default_factory=list)
    #: What runs only when the module is started as a program.
    program: list[ast.AST] = field(default_factory=list)

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @cached_property
    def public(self) -> list[str]:
        """The names in ``__all__``."""
        return [str(name) for each in self.names.get("__all__", ()) for name in ast.literal_eval(each.value)]  # type: ignore[attr-defined]

    def read(self, statements: Iterable[ast.stmt], for_types: bool = False) -> None:
        """Sort the statements of the module, those in ``if`` and ``try`` too."""
        for each in statements:
            if isinstance(each, ast.Import | ast.ImportFrom):
                found = dict(targets(each, self))
                self.imports.update(found)
                self.imported += [] if for_types else found.values()
            elif isinstance(each, Function | ast.ClassDef):
                self.names[each.name].append(each)
                known = all(last_name(decorator) in _QUIET_DECORATORS for decorator in each.decorator_list)
                if not known or is_dunder(each.name):
                    self.runs.append(each)
            elif isinstance(each, ast.Assign | ast.AnnAssign) and all(
                isinstance(to, ast.Name) for to in assigned(each)
            ):
                for to in assigned(each):
                    self.names[to.id].append(each)  # type: ignore[attr-defined]
            elif isinstance(each, ast.If):
                test = ast.unparse(each.test)
                if "__name__" in test:
                    self.program += each.body
                else:
                    self.runs.append(each.test)
                    self.read(each.body, for_types or "TYPE_CHECKING" in test)
                self.read(each.orelse, for_types)
            elif isinstance(each, ast.Try):
                handled = [statement for handler in each.handlers for statement in handler.body]
                self.read([*each.body, *handled, *each.orelse, *each.finalbody], for_types)
            elif not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
                self.runs.append(each)


def assigned(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def last_name(node: ast.AST) -> str:
    """``c`` of ``a.b.c``, ``a.b.c(...)`` and ``a.b.c[...]``."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def targets(statement: ast.Import | ast.ImportFrom, module: Module) -> Iterator[tuple[str, Target]]:
    """The names that an import brings, and what they stand for."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            first = alias.name.partition(".")[0]
            yield alias.asname or first, Target(alias.name if alias.asname else first)
            yield f"import {alias.name}", Target(alias.name)  # no name in the source can be this
        return
    base = statement.module or ""
    if statement.level:
        parts = module.package.split(".")
        base = ".".join([*parts[: len(parts) - statement.level + 1], *([base] if base else [])])
    for alias in statement.names:
        yield alias.asname or alias.name, Target(base, alias.name)


def own_parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement; of a class without its methods, which are reached one by one."""
    if not isinstance(node, ast.ClassDef):
        yield node
        return
    yield from (*node.bases, *(keyword.value for keyword in node.keywords), *node.decorator_list)
    yield from (each for each in node.body if not isinstance(each, Function))


def lines_of(node: ast.AST) -> int:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
    return (node.end_lineno or first) - first + 1  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Unreached:
    """A module (no name), or a name of a reached module. ``line``: where it begins."""

    module: str
    path: Path
    line: int
    name: str
    lines: int

    def __str__(self) -> str:
        what = self.name or "the module"
        return f"{self.path}:{self.line}: {what}, {self.lines} lines"


class Walk:
    """What is reached so far, and what waits to be looked at."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self.modules: set[str] = set()
        self.names: set[Target] = set()
        self._programs: set[str] = set()
        #: Attributes, and identifiers in strings, of reached code.
        self._attributes: set[str] = set()
        #: Name -> the methods of reached classes that wait for its use.
        self._waiting: dict[str, list[tuple[Target, Function]]] = defaultdict(list)
        #: Modules that are handed on as objects. An attribute of any object may be a name of theirs.
        self._objects: set[str] = set()
        self._due: list[tuple[Module, ast.AST]] = []

    def begin(self, entry: str) -> None:
        """Reach an entry point, written as in `ENTRY_POINTS`, and all that follows from it. Raises KeyError."""
        name, _, what = entry.partition(":")
        module = self._modules[name]
        self._start(name)
        for each in module.public if what == "*" else [what] if what else []:
            home = self._home(Target(name, each))
            if home is None and what != "*":
                raise KeyError(f"{name} has no {each}")
            if home is not None:
                self._reach(home)
                self._call_methods(home)
        while self._due:
            self._look_at(*self._due.pop())

    def _call_methods(self, home: Target) -> None:
        """The public methods of a class may be called by anybody."""
        for statement in self._modules[home.module].names.get(home.name, ()):
            for method in statement.body if isinstance(statement, ast.ClassDef) else ():
                if isinstance(method, Function) and not method.name.startswith("_"):
                    self._reach_method(home, method)

    def _start(self, name: str) -> None:
        """The module is imported, or started as a program."""
        self._import(name)
        if name not in self._programs:
            self._programs.add(name)
            self._due += [(self._modules[name], node) for node in self._modules[name].program]

    def _import(self, name: str) -> None:
        module = self._modules[name]
        if name in self.modules:
            return
        self.modules.add(name)
        if "." in name:
            self._import(name.rpartition(".")[0])
        for target in module.imported:
            self._import_target(target)
        for node in module.runs:
            if isinstance(node, Function | ast.ClassDef):
                self._reach(Target(name, node.name))
            else:
                self._due.append((module, node))

    def _import_target(self, target: Target) -> None:
        for name in (target.module, f"{target.module}.{target.name}"):
            if name in self._modules:
                self._import(name)

    def _home(self, target: Target) -> Target | None:
        """Where a name is defined; a module without a name if it is one; None if it is no name of ours."""
        seen: set[Target] = set()
        while target not in seen:
            seen.add(target)
            module = self._modules.get(target.module)
            if module is None:
                return None
            if not target.name or target.name in module.names:
                return target
            if target.name in module.imports and module.imports[target.name] != target:
                target = module.imports[target.name]
            elif f"{target.module}.{target.name}" in self._modules:
                return Target(f"{target.module}.{target.name}")
            elif (home := self._lazy_home(module, target.name)) is not None:
                target = Target(home, target.name)
        return None

    def _lazy_home(self, module: Module, name: str) -> str | None:
        """The module that a package's table of lazy names has for the name."""
        for statement in module.names.get(LAZY, ()):
            table = statement.value  # type: ignore[attr-defined]
            for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                    return str(value.value)
        return None

    def _reach(self, target: Target) -> bool:
        """Whether the name is one of ours, which then is reached."""
        home = self._home(target)
        if home is None:
            return False
        if target.module in self._modules:
            self._import(target.module)
        self._import(home.module)
        if home.name and home.name != LAZY and home not in self.names:
            self.names.add(home)
            module = self._modules[home.module]
            for statement in module.names[home.name]:
                self._due += [(module, part) for part in own_parts(statement)]
                if isinstance(statement, ast.ClassDef):
                    self._wait_for_methods(home, module, statement)
        return True

    def _wait_for_methods(self, home: Target, module: Module, statement: ast.ClassDef) -> None:
        called_by_others = self._is_foreign(module, statement)
        for method in statement.body:
            if not isinstance(method, Function):
                continue
            known = all(last_name(decorator) in _QUIET_DECORATORS for decorator in method.decorator_list)
            if called_by_others or not known or is_dunder(method.name) or method.name in self._attributes:
                self._reach_method(home, method)
            else:
                self._waiting[method.name].append((home, method))

    def _reach_method(self, home: Target, method: Function) -> None:
        target = Target(home.module, f"{home.name}.{method.name}")
        if target not in self.names:
            self.names.add(target)
            self._due.append((self._modules[home.module], method))

    def _is_foreign(self, module: Module, statement: ast.ClassDef) -> bool:
        """Whether a class derives from one of another project, which may call its methods."""
        for base in statement.bases:
            home = self._resolve(module, module.imports, base)
            if home is None:
                if last_name(base) not in _QUIET_BASES:
                    return True
                continue
            owner = self._modules[home.module]
            bases = [each for each in owner.names[home.name] if isinstance(each, ast.ClassDef)] if home.name else []
            if any(self._is_foreign(owner, each) for each in bases):
                return True
        return False

    def _resolve(self, module: Module, imports: Mapping[str, Target], node: ast.AST) -> Target | None:
        """What a name or a dotted path stands for; None if it is nothing of ours."""
        if isinstance(node, ast.Subscript):
            return self._resolve(module, imports, node.value)
        if isinstance(node, ast.Name):
            target = imports.get(node.id, Target(module.name, node.id))
            return self._home(target)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(module, imports, node.value)
            if owner is not None and not owner.name:
                return self._home(Target(owner.module, node.attr))
        return None

    def _look_at(self, module: Module, node: ast.AST) -> None:
        """Reach what the node uses."""
        imports, local = dict(module.imports), set[str]()
        parts = list(ast.walk(node))
        if isinstance(node, Function):
            local |= {each.arg for each in parts if isinstance(each, ast.arg)}
            local |= {each.id for each in parts if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
            local -= {name for each in parts if isinstance(each, ast.Global) for name in each.names}
        for part in parts:
            if isinstance(part, ast.Import | ast.ImportFrom):
                found = dict(targets(part, module))
                imports.update(found)
                local -= found.keys()
                for target in found.values():
                    self._import_target(target)
        owners = {id(part.value) for part in parts if isinstance(part, ast.Attribute)}
        for part in parts:
            if isinstance(part, ast.Name) and part.id not in local:
                target = imports.get(part.id, Target(module.name, part.id))
                self._reach(target)
                home = None if id(part) in owners else self._home(target)
                if home is not None and not home.name:
                    self._hand_on(home.module)
            elif isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Store):
                self._use_attribute(part.attr)
                home = self._resolve(module, imports, part)
                if home is not None:
                    self._reach(home)
                owner = self._resolve(module, imports, part.value) if part.attr in ("__file__", "__name__") else None
                if owner is not None and not owner.name:
                    self._start(owner.module)
            elif isinstance(part, ast.Dict):
                for key, value in zip(part.keys, part.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        self._reach(Target(str(key.value), str(value.value)))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                self._use_text(module, part.value)

    def _use_text(self, module: Module, text: str) -> None:
        if _IDENTIFIER.match(text):
            self._use_attribute(text)
            if LAZY in module.names:
                self._reach(Target(module.name, text))
        if text.endswith(".py") and f"{module.package}.{text[:-3]}" in self._modules:
            self._start(f"{module.package}.{text[:-3]}")
        for found in _MODULE_IN_TEXT.findall(text):
            name, _, what = found.partition(":")
            if name in self._modules:
                self._start(name)
            owner, _, last = name.rpartition(".")
            self._reach(Target(name, what) if what else Target(owner, last))

    def _hand_on(self, name: str) -> None:
        if name not in self._objects:
            self._objects.add(name)
            for own in self._modules[name].names.keys() & self._attributes:
                self._reach(Target(name, own))

    def _use_attribute(self, name: str) -> None:
        if name not in self._attributes:
            self._attributes.add(name)
            for each in self._objects:
                if name in self._modules[each].names:
                    self._reach(Target(each, name))
            for home, method in self._waiting.pop(name, ()):
                self._reach_method(home, method)


def modules_of(root: Path) -> dict[str, Module]:
    """All modules of the packages that users install, by name."""
    found: dict[str, Module] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            module = found[name] = Module(name, path, ast.parse(path.read_text()))
            module.read(module.tree.body)
    return found


def unreached(modules: Mapping[str, Module], walk: Walk, root: Path) -> Iterator[Unreached]:
    """What the walk did not reach."""
    for name, module in modules.items():
        path = module.path.relative_to(root)
        if name not in walk.modules:
            yield Unreached(name, path, 1, "", len(module.path.read_text().splitlines()))
            continue
        for own, statements in module.names.items():
            if is_dunder(own) or own == LAZY:
                continue
            for statement in statements:
                if Target(name, own) not in walk.names:
                    yield Unreached(name, path, statement.lineno, own, lines_of(statement))
                elif isinstance(statement, ast.ClassDef):
                    for method in statement.body:
                        whole = f"{own}.{getattr(method, 'name', '')}"
                        if isinstance(method, Function) and Target(name, whole) not in walk.names:
                            yield Unreached(name, path, method.lineno, whole, lines_of(method))


def main() -> int:
    modules = modules_of(ROOT)
    walk = Walk(modules)
    for entry in (*ENTRY_POINTS, *CALLED_BY_OTHERS):
        walk.begin(entry)
    before = list(unreached(modules, walk, ROOT))
    for name in NOT_ATTACHED_YET:
        for each in (name, *(f"{name}:{own}" for own in modules[name].names if not is_dunder(own))):
            walk.begin(each)
    found = list(unreached(modules, walk, ROOT))
    for each in found:
        print(each)
    for name, why in NOT_ATTACHED_YET.items():
        print(f"{name} is to be attached: {why}")
    waiting = sum(each.lines for each in set(before) - set(found))
    lines = sum(each.lines for each in found)
    total = sum(len(module.path.read_text().splitlines()) for module in modules.values())
    print(f"{lines} lines of {total} are unreached ({MOST_LINES} at most), and {waiting} are to be attached")
    return int(lines > MOST_LINES)


if __name__ == "__main__":
    sys.exit(main())

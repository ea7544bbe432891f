"""What the modules of a trial leave: the user's own are forgotten, and few packages are known to keep nothing.

A package stays imported, with its state, when the trial leaves. Only packages whose state is looked at may stay so.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from types import FunctionType, ModuleType

import fluidtune

#: Packages of this project, which are no user's own wherever they are.
OURS = {"fluidtune", "salus_share", "symphony_serve", "themis_bridge"}
#: Packages whose state is looked at, and those that they need, as names of modules. The latter are the requirements of
#: the former's distributions, and the requirements of these, by importlib.metadata without extras, but with "tune" of
#: Ray's (numpy 2.4, torch 2.13, scikit-learn 1.9, pandas 3.1, matplotlib 3.11, Ray 2.60). six and pytz are those of
#: releases before, triton is that of torch for CUDA, and tqdm is what torch.hub imports if it is there.
#: pytest, which has no part in a trial, is imported by a trial whose function stands in a test's module.
VETTED = {
    *OURS,
    *("numpy", "torch", "sklearn", "pandas", "matplotlib", "ray"),
    *("functorch", "torchgen", "filelock", "typing_extensions", "setuptools", "_distutils_hack", "pkg_resources"),
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "triton", "tqdm", "scipy", "joblib"),
    *("cloudpickle", "narwhals", "threadpoolctl", "dateutil", "tzdata", "six", "pytz", "mpl_toolkits", "pylab"),
    *("contourpy", "cycler", "fontTools", "kiwisolver", "packaging", "PIL", "pyparsing", "click", "jsonschema"),
    *("attr", "attrs", "jsonschema_specifications", "referencing", "rpds", "msgpack", "google", "_yaml", "yaml"),
    *("requests", "charset_normalizer", "idna", "urllib3", "certifi", "tensorboardX", "pyarrow", "pydantic"),
    *("pydantic_core", "annotated_types", "typing_inspection", "rich", "markdown_it", "mdurl", "pygments", "psutil"),
    *("pynvml", "highspy"),
    # What Ray's own modules import besides, where its extras "default" and "serve" are installed.
    *("colorful", "aiohttp", "aiohttp_cors", "aiosignal", "aiohappyeyeballs", "frozenlist", "multidict", "yarl"),
    *("propcache", "async_timeout", "grpc", "opencensus", "opentelemetry", "prometheus_client", "smart_open"),
    # A trial whose function stands in a test's module imports pytest, which does nothing there.
    *("pytest", "_pytest", "iniconfig", "pluggy", "py"),
}
#: The folders of Python's own modules, and the names of folders that hold installed packages: CPython's and Debian's.
_PYTHONS = tuple(os.path.join(sysconfig.get_paths()[each], "") for each in ("stdlib", "platstdlib"))
_ROOT = os.path.join(os.path.dirname(os.path.dirname(fluidtune.__file__)), "")
_SITES = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")


@cache
def package_of(file: str) -> str | None:
    """The installed package that a file is of; "" for Python's own; None: it is the user's own."""
    found = _SITES.search(file)
    if found is not None:
        return found[1]
    if file.startswith(_ROOT) and file[len(_ROOT) :].split(os.sep)[0] in OURS:  # in a checkout
        return file[len(_ROOT) :].split(os.sep)[0]
    return "" if os.path.realpath(file).startswith(_PYTHONS) or file.startswith(("<frozen ", *_PYTHONS)) else None


def owner(name: str) -> str | None:
    """The outermost package that an imported module is in. "": Python; None: it is the user's own.

    Compiled modules may have names without their package.
    """
    module = sys.modules.get(name.partition(".")[0]) or sys.modules[name]
    file = getattr(module, "__file__", None) or getattr(getattr(module, "__spec__", None), "origin", None)
    if file in ("built-in", "frozen") or name.startswith(("_cython_", "cython_runtime")):
        return ""
    return package_of(os.path.abspath(file or next(iter(getattr(module, "__path__", ())), "")))


def forget(names: set[str], known: set[str]) -> str | None:
    """Take those of these modules that are the user's own out of sight, so that the next trial imports them anew.

    ``known``: names of modules that were imported before the trial, or by a fork server. Returns why that is not enough
    for the next trial, in words; None: it is enough.
    """
    owners = {name: owner(name) for name in sorted(names)}
    own = {name: sys.modules.pop(name) for name, package in owners.items() if package is None}
    packages = {package for package in owners.values() if package}
    loaders = {name: getattr(getattr(module, "__spec__", None), "loader", None) for name, module in own.items()}
    stuck = [name for name, loader in loaders.items() if isinstance(loader, ExtensionFileLoader)]
    if stuck:
        return f"modules that cannot be imported anew: {', '.join(stuck)}"
    if packages - VETTED:
        return f"packages that may keep something: {', '.join(sorted(packages - VETTED))}"
    from_files = packages - {name.partition(".")[0] for name in known} if names - known - own.keys() else set()
    if from_files:
        return f"packages that were imported from their files: {', '.join(sorted(from_files))}"
    for name in names - known - own.keys() if own else ():
        module = sys.modules[name]
        held = next((each for value in list(vars(module).values()) if (each := _home(value)) in own), None)
        if held is not None:
            return f"the module {held}, which would be imported anew, but {name} holds the old one"
    return None


def _home(value: object) -> str | None:
    """The module that a value is, or that it or its type is of. Nothing is asked of objects, which may be proxies."""
    if isinstance(value, ModuleType):
        return value.__name__
    named = value if issubclass(type(value), type | FunctionType) else type(value)
    return str(getattr(named, "__module__", None))

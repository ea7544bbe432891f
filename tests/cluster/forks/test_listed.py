"""Each package on the list leaves, after its import, nothing that forks would lack or share.

The newest releases are in two environments: those that are not in this one are looked at by `make test-frameworks`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluidtune.cluster.forks.preload import LISTED
from tests.cluster.forks.conftest import Served

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
#: Package -> what scripts import of it.
MODULES = {
    "numpy": ["numpy", "numpy.random", "numpy.linalg"],
    "scipy": ["scipy", "scipy.stats", "scipy.optimize"],
    "pandas": ["pandas"],
    "sklearn": ["sklearn", "sklearn.ensemble", "sklearn.datasets", "sklearn.model_selection"],
    "matplotlib": ["matplotlib.pyplot"],
    "torch": ["torch", "torch.utils.data", "torch.distributed", "torch._dynamo", "fluidtune.elastic.session"],
    "torchvision": ["torchvision", "torchvision.datasets", "torchvision.transforms"],
    "ray": ["ray", "ray.tune", "ray.train", "ray.train.torch", "ray.data", "fluidtune.cluster.hosting.worker"],
    "lightning": ["lightning", "lightning.pytorch"],
    "pytorch_lightning": ["pytorch_lightning"],
    "transformers": ["transformers", "transformers.trainer", "transformers.models.bert.modeling_bert"],
    "accelerate": ["accelerate"],
    "keras": ["keras"],
    "xgboost": ["xgboost"],
    "lightgbm": ["lightgbm"],
    "optuna": ["optuna"],
    "tensorboard": ["tensorboard", "torch.utils.tensorboard"],
    "tensorboardX": ["tensorboardX"],
    "mlflow": ["mlflow"],
    "sqlalchemy": ["sqlalchemy", "sqlalchemy.orm"],
    "alembic": ["alembic", "alembic.command"],
}
#: What two forks have in common that two new processes have not, and why that harms nobody.
HARMLESS = {
    r"numpy\.f2py\.rules\.generationtime": "a time, as a text",
    r"pyparsing\.(.*\.)?common_?(html|HTML)_?(entity|Entity)\._defaultName": "a description, in a set's order",
    r"joblib\._multiprocessing_helpers\..*": "the name of a semaphore that is gone; its generator begins anew",
    r"sympy\.(.*\.)?Dummy\._(prng|base_dummy_index)": "names of a process' own symbols, which another must unpickle",
    r"transformers\.utils\.hub\.SESSION_ID": "which session it is in what the Hub is told of downloads",
    r"torch\.distributed\._composable\..*": "by which name a module keeps what a wrapper has put there",
    r".*\.__doc__": "a text with an address",
    r"(opentelemetry|fastapi)\..*_KEY": "under which a process keeps a value in contexts of its own",
    r"ray\..*\._uuid": "Ray's own function: the same one in each process of a job",
}
LOOKS = """
import importlib, sys
from tests.cluster.forks.held import held
before = held()
for name in sys.argv[1:]:
    importlib.import_module(name)
print("\\n" + str(sorted(held() - before)))
"""


def environment() -> dict[str, str]:
    """As that of a process with one core; TMPDIR is the test's."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "MPLBACKEND": "agg"}
    return {**os.environ, **own, "PYTHONHASHSEED": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def said(words: list[str]) -> str:
    done = subprocess.run(words, env=environment(), cwd="/", capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_the_list_is_looked_at_whole() -> None:
    assert MODULES.keys() == LISTED.keys()


def there(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks")


@pytest.mark.parametrize("package", MODULES)
def test_nothing_is_left_that_forks_would_lack_or_share(package: str) -> None:
    there(package)
    assert said([sys.executable, "-c", LOOKS, *MODULES[package]]) == "[]"


@pytest.mark.parametrize("package", MODULES)
def test_two_forks_have_drawn_nothing_in_common(package: str, serve: Callable[..., Served]) -> None:
    there(package)
    served = serve(ROOT, *MODULES[package], **environment())
    program, modules = Path(__file__).with_name("drawn.py"), MODULES[package]

    def forked() -> dict[str, Any]:
        done = served.start(program, *modules, environment={})
        assert done.returncode == 0 and "plain" not in done.stderr, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    plain = [sys.executable, str(program), *modules]
    (one, other), (new, another) = [forked(), forked()], [json.loads(said(plain)), json.loads(said(plain))]
    common = one.keys() & other.keys() & new.keys() & another.keys()
    shared = {each for each in common if one[each] == other[each] and new[each] != another[each]}
    strange = sorted(each for each in shared if not any(re.fullmatch(known, each) for known in HARMLESS))
    assert not strange, "\n".join(strange)

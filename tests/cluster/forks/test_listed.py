"""Each package on the list leaves, after its import, nothing that forks would lack or share.

The newest releases are in two environments: those that are not in this one are looked at by `make test-frameworks`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fluidtune.cluster.forks.preload import LISTED
from tests.contracts.processes import python

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(300)]

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
LOOKS = """
import importlib, sys
from tests.cluster.forks.held import held
before = held()
for name in sys.argv[1:]:
    importlib.import_module(name)
print("\\n" + str(sorted(held() - before)))
"""


#: As that of a process with one core.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "MPLBACKEND": "agg", "PYTHONHASHSEED": "0"}
ENVIRONMENT |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def test_the_list_is_looked_at_whole() -> None:
    assert MODULES.keys() == LISTED.keys()


@pytest.mark.parametrize("package", MODULES)
def test_nothing_is_left_that_forks_would_lack_or_share(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks")
    assert python("-c", LOOKS, *MODULES[package], cwd=Path("/"), **ENVIRONMENT).splitlines()[-1] == "[]"

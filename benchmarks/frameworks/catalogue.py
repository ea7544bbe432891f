"""The scripts by name, and the modules that each one imports."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
#: Name of a script -> the modules that it needs beside Ray, torch and NumPy. The shortest comes last: --quick runs it.
NEEDS = {
    "transformers_trainer": ("transformers", "accelerate"),
    "hyperparameter_search": ("transformers", "accelerate"),
    "wandb_offline": ("wandb",),
    "mlflow_runs": ("mlflow", "sqlalchemy", "alembic"),
    "lightning_trials": ("lightning",),
    "accelerate_precision": ("accelerate",),
    "keras_registry": ("keras",),
    "tensorboard_open": ("tensorboard",),
    "xgboost_trials": ("xgboost", "sklearn"),
}


def missing(name: str) -> list[str]:
    """The modules of the script ``name`` that are not installed. None of them is imported here."""
    return [module for module in NEEDS[name] if importlib.util.find_spec(module) is None]


def path(name: str) -> Path:
    """The file of the script ``name``."""
    return SCRIPTS / f"{name}.py"

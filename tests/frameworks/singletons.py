"""What libraries keep for a whole process: how a trial changes it, and how another one sees it.

``python singletons.py change|see``: ``see`` prints one JSON line, name -> what is seen.
"""

import importlib.util
import json
import sys

#: Module.what -> what changes it, and an expression that shows it.
SINGLETONS = {
    "accelerate.precision": (
        "from accelerate import Accelerator; Accelerator(cpu=True, mixed_precision='bf16')",
        "__import__('accelerate').state.AcceleratorState._shared_state.get('_mixed_precision')",
    ),
    "accelerate.process": (
        "from accelerate import PartialState; PartialState(cpu=True)",
        "sorted(__import__('accelerate').state.PartialState._shared_state)",
    ),
    "transformers.auto_config": (
        "import transformers as t\n"
        "class C(t.PretrainedConfig): model_type = 'a-trials'\n"
        "t.AutoConfig.register('a-trials', C)",
        "'a-trials' in __import__('transformers').models.auto.configuration_auto.CONFIG_MAPPING",
    ),
    "keras.registry": (
        "import keras\n@keras.saving.register_keras_serializable('a', 'b')\ndef f(x): return x",
        "sorted(__import__('keras').saving.get_custom_objects())",
    ),
    "keras.float": ("import keras; keras.config.set_floatx('float16')", "__import__('keras').config.floatx()"),
    "keras.names": ("import keras; keras.layers.Dense(1)", "__import__('keras').layers.Dense(1).name"),
    "keras.policy": (
        "import keras; keras.mixed_precision.set_global_policy('mixed_bfloat16')",
        "__import__('keras').mixed_precision.dtype_policy().name",
    ),
    "mlflow.uri": (
        "import mlflow; mlflow.set_tracking_uri('sqlite:///a-trials.db')",
        "'a-trials' in __import__('mlflow').get_tracking_uri()",
    ),
    "lightning.seed": (
        "import lightning; lightning.seed_everything(5, workers=True)",
        "[__import__('os').environ.get(n) for n in ('PL_GLOBAL_SEED', 'PL_SEED_WORKERS')]",
    ),
    "lightning.log": (
        "import logging, lightning.pytorch\nlogging.getLogger('lightning.pytorch').handlers.clear()",
        "__import__('lightning.pytorch') and len(__import__('logging').getLogger('lightning.pytorch').handlers)",
    ),
    "lightgbm.logger": (
        "import lightgbm, logging; lightgbm.register_logger(logging.getLogger('a'))",
        "type(__import__('lightgbm').basic._LOGGER).__name__",
    ),
    "optuna.handler": (
        "import optuna; optuna.logging.disable_default_handler()",
        "len(__import__('logging').getLogger(__import__('optuna').__name__).handlers)",
    ),
    "sqlalchemy.events": (
        "import sqlalchemy.event, sqlalchemy.engine\n"
        "sqlalchemy.event.listen(sqlalchemy.engine.Engine, 'connect', print)",
        "__import__('sqlalchemy.engine').event.contains("
        "__import__('sqlalchemy.engine').engine.Engine, 'connect', print)",
    ),
    "torch.dtype": (
        "import torch; torch.set_default_dtype(torch.float64)",
        "str(__import__('torch').get_default_dtype())",
    ),
    "torch.group": (
        "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
        "__import__('torch').distributed.is_initialized()",
    ),
}


def there(name: str) -> bool:
    """Whether the library of a singleton is installed."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def main(what: str) -> None:
    """Change everything that is installed, or print what is seen of it."""
    found = {}
    for name, (change, seen) in SINGLETONS.items():
        if there(name):
            if what == "change":
                exec(change, {})
            else:
                found[name] = eval(seen)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

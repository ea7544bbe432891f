"""What every Python process of a guide's run does at its start: trials get seeds, and a search gets few trials.

`benchmarks.guides` puts this directory into PYTHONPATH, so that neither the script nor Ray or FluidTune is edited.
``GUIDE_SAMPLES`` is the ``num_samples`` of every search. ``GUIDE_NOTES`` is a file that gets one line of JSON for each
`TuneConfig`: the classes of its scheduler and of its search algorithm, and whether it keeps actors. A trial's random
streams begin from its configuration, and the driver's from one text, because guides have no seeds and could not be
compared. Keras' MNIST comes from the files that torchvision looks for, because Keras would check those that it fetches
by their hashes.
"""

import functools
import importlib.abc
import importlib.util
import sys


def seed(text):
    """Begin the global random streams of this process from a text; those of packages only if they are imported."""
    import random
    import zlib

    number = zlib.crc32(text.encode())
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(number)


def trials_are_seeded(tune):
    import json

    made, reset = tune.Trainable.__init__, tune.Trainable.reset

    def text(config):
        kept = {key: value for key, value in (config or {}).items() if not key.startswith("__")}
        return json.dumps(kept, sort_keys=True, default=lambda each: type(each).__name__)

    @functools.wraps(made)
    def __init__(self, config=None, storage=None):
        seed(text(config))
        made(self, config, storage)

    @functools.wraps(reset)
    def seeded_reset(self, new_config, *args, **kwargs):
        seed(text(new_config))
        return reset(self, new_config, *args, **kwargs)

    tune.Trainable.__init__, tune.Trainable.reset = __init__, seeded_reset
    searches_are_short(tune)


def searches_are_short(tune):
    import json
    import os

    made = tune.TuneConfig.__init__

    @functools.wraps(made)
    def __init__(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.num_samples = int(os.environ["GUIDE_SAMPLES"])
        names = [None if each is None else type(each).__name__ for each in (self.scheduler, self.search_alg)]
        with open(os.environ["GUIDE_NOTES"], "a") as notes:
            notes.write(json.dumps([*names, self.reuse_actors]) + "\n")
        seed("driver")

    tune.TuneConfig.__init__ = __init__


def digits_are_made_up(module):
    import os

    import numpy

    def load_data(path=None):
        raw = os.path.expanduser("~/data/MNIST/raw/")
        parts = []
        for part in ("train", "t10k"):
            images = numpy.fromfile(f"{raw}{part}-images-idx3-ubyte", numpy.uint8)[16:].reshape(-1, 28, 28)
            parts.append((images, numpy.fromfile(f"{raw}{part}-labels-idx1-ubyte", numpy.uint8)[8:]))
        return tuple(parts)

    module.load_data = load_data


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when it has been imported. One that no process imports costs nothing."""

    def __init__(self):
        self.wanted = {
            "ray.tune": trials_are_seeded,
            "keras.src.datasets.mnist": digits_are_made_up,
            "tf_keras.src.datasets.mnist": digits_are_made_up,
        }

    def find_spec(self, name, path=None, target=None):
        change = self.wanted.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())

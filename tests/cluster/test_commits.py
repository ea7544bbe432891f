"""Which commit belongs to which configuration."""

from __future__ import annotations

import json

import numpy
from ray.tune.utils.serialization import TuneFunctionDecoder, TuneFunctionEncoder

from fluidtune.cluster.commit_stores import fingerprint


def after_a_restore(config: dict[str, object]) -> dict[str, object]:
    """The configuration as Tune's experiment state gives it back."""
    try:
        decoder = TuneFunctionDecoder(allow_cloudpickle=True)
    except TypeError:  # older versions of Ray always allow it
        decoder = TuneFunctionDecoder()
    return decoder.decode(json.dumps(config, cls=TuneFunctionEncoder))


def test_a_fingerprint_outlives_the_driver() -> None:
    name = "".join(["re", "lu"])  # one object, that comes back as two
    config = {
        "betas": (0.9, 0.999),
        "first": name,
        "second": name,
        "layers": {10: 1, 9: 2},
        "scale": numpy.float32(0.5),
        "choice": numpy.int64(3),
        "__trial_info__": "not the user's",
    }
    assert fingerprint(config) == fingerprint(after_a_restore(config))
    assert fingerprint(config) == fingerprint({**config, "__trial_info__": None})
    assert fingerprint(config) == fingerprint(dict(reversed(config.items())))


def test_another_configuration_has_another_fingerprint() -> None:
    prints = [fingerprint(config) for config in ({"x": 1}, {"x": 2}, {"x": numpy.float32(1)}, {"y": 1}, {"x": [1]})]
    assert len(set(prints)) == len(prints)

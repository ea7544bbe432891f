"""The service that BentoML's server runs for `benchmarks.serve_http_sides`: adaptive batching of one model.

The environment variable SIDE has checkpoint and setting.
"""

from __future__ import annotations

from typing import Any

import bentoml

from benchmarks.serve_http_sides import given, load

DIRECTORY, _, SETTING = given()


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Digits:
    """The network; it takes and gives a list, as what BentoML batches must."""

    def __init__(self) -> None:
        self._model = load(DIRECTORY, {})

    @bentoml.api(route="/", batchable=True, max_batch_size=SETTING.size, max_latency_ms=int(1e3 * SETTING.wait_s))
    def answer(self, images: list[Any], /) -> list[int]:
        return self._model(images)

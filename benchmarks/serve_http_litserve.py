"""LitServe's server for `benchmarks.serve_http_sides`: batches of one model. The variable SIDE is that of `given`."""

from __future__ import annotations

from typing import Any

import litserve

from benchmarks.serve_http_sides import given, load


class Api(litserve.LitAPI):
    """The network; LitServe pickles this class into its worker."""

    def setup(self, device: str) -> None:
        self._model = load(given()[0], {})

    # LitServe reads a type as that of a parameter of the query; without one it gives the parsed body.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return request

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, batch: list[Any]) -> list[int]:
        return self._model(batch)

    def unbatch(self, output: list[int]) -> list[int]:
        return output

    def encode_response(self, output: int) -> int:
        return output


if __name__ == "__main__":
    # Imported under its own name: the worker could not find a class of __main__.
    from benchmarks.serve_http_litserve import Api as Imported

    _, port, setting = given()
    api = Imported(max_batch_size=setting.size, batch_timeout=setting.wait_s, api_path="/")
    timeout = False if setting.limit is None else setting.limit
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=timeout)
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False, access_log=False)

"""A body that is one input as a JSON value, which is answered by its output: ``POST /`` and ``POST /TRIAL``.

`inference_protocol.Interface` has the same methods for bodies of tensors. Whether the input is of the form of the
samples says `symphony_serve.forms`. msgspec has no type for that form: a whole number may be written
``2.0``, and an object with other keys than the samples is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fluidtune.serving.inference_protocol import Asked, read_json
from symphony_serve.errors import ServeError
from symphony_serve.forms import Form


class PlainInput(NamedTuple):
    """A model whose inputs have this form, as it is asked without the protocol."""

    form: Form

    def decode(self, headers: Mapping[str, str], body: bytes, most: int) -> Asked:
        """The input in a body. Raises ServeError if it is no JSON value, or one of another form."""
        value = read_json(body, "the body is no JSON value")
        trouble = self.form.trouble(value)
        if trouble is not None:
            raise ServeError(trouble)
        return Asked(None, [value], {})

    def encode(
        self, asked: Asked, model: str, version: str | None, texts: Sequence[str]
    ) -> tuple[bytes, dict[str, str]]:
        """Body and headers of the answer."""
        return texts[0].encode(), {"Content-Type": "application/json"}

    def check_outputs(self, names: Iterable[str]) -> None:
        """The whole output is answered."""

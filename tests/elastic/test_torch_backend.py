"""torch.distributed keeps the contract of a collective backend."""

from __future__ import annotations

import pytest

from fluidtune.elastic.backends import TorchBackend
from fluidtune.elastic.backends.torch_backend import interface_of
from fluidtune.testing.collective_backends import CollectiveBackendContract

pytestmark = pytest.mark.slow


def make(host: str = "127.0.0.1", form_timeout: float = 30.0) -> TorchBackend:
    return TorchBackend(host, form_timeout=form_timeout)


class TestTorchBackend(CollectiveBackendContract):
    make = staticmethod(make)


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"203\.0\.113\.9"):
        interface_of("203.0.113.9")

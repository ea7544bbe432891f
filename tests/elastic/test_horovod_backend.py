"""Horovod keeps the contract of a collective backend."""

from __future__ import annotations

import pytest

from fluidtune.elastic.backends import HorovodBackend

from .backend_contract import BackendContract

pytestmark = pytest.mark.horovod


def make(host: str = "127.0.0.1", form_timeout: float = 30.0) -> HorovodBackend:
    return HorovodBackend(host, form_timeout=form_timeout)


class TestHorovodBackend(BackendContract):
    make = staticmethod(make)

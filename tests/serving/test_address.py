"""Where a service listens, of IPv4 and IPv6, and its URL."""

from __future__ import annotations

import errno
import socket

import httpx
import pytest

from fluidtune.errors import FluidTuneError
from fluidtune.serving import service
from fluidtune.serving.address import is_of_this_machine, listening, url_of


@pytest.mark.parametrize(
    ("host", "url", "alone"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/", True),
        ("localhost", "http://127.0.0.1:8000/", True),
        ("0.0.0.0", "http://127.0.0.1:8000/", False),
        ("::1", "http://[::1]:8000/", True),
        ("::", "http://127.0.0.1:8000/", False),
        ("head.example", "http://head.example:8000/", False),
    ],
)
def test_the_url_of_a_host_and_whether_others_reach_it(host, url, alone):
    assert url_of(host, 8000) == url and is_of_this_machine(host) == alone
    # Seen: of a service on "::" other machines were told [::1].
    assert url_of(host, 8000, "fd00::7") == ("http://[fd00::7]:8000/" if host in ("::", "0.0.0.0") else url)
    assert httpx.URL(url_of(host, 8000)).port == 8000


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_host_of_ipv6_is_tried_as_one(monkeypatch, host, family):
    """Seen: `fluidtune serve start --host ::1` was always refused."""
    tried = []

    def create_server(address, *, family=socket.AF_INET, **given):
        tried.append(family)
        raise OSError(errno.EADDRINUSE, "taken")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(FluidTuneError, match=f"port 8000 of {host} is taken"):
        service._check_port(host, 8000)
    assert tried == [family]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_what_listens_is_reached_at_the_url(host):
    with listening(host, 0) as opened:
        url = httpx.URL(url_of(host, opened.getsockname()[1]))
        socket.create_connection((url.host, url.port)).close()

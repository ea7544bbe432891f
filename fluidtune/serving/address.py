"""The address of a service: its socket, and the URL at which clients of this machine reach it."""

from __future__ import annotations

import ipaddress
import socket

#: The hosts that stand for all addresses of the machine.
_ALL = ("", "0.0.0.0", "::")


def listening(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens there; "::" is all addresses, of IPv4 as well. Raises OSError if it cannot be had."""
    family, both = socket.AF_INET6 if ":" in host else socket.AF_INET, host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)


def is_of_this_machine(host: str) -> bool:
    """Whether only processes of this machine reach what listens there. A name that is not localhost may be any."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int, machine: str = "127.0.0.1") -> str:
    """The URL of what listens there. machine: the address to give if it listens at all of them."""
    reached = machine if host in _ALL else "127.0.0.1" if host == "localhost" else host
    return f"http://[{reached}]:{port}/" if ":" in reached else f"http://{reached}:{port}/"

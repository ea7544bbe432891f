"""The address of a service: its socket, and the URL at which clients of this machine reach it."""

from __future__ import annotations

import ipaddress
import socket

#: A host that stands for the machine, or for all of its addresses of IPv6, and one of these addresses.
_REACHED = {"localhost": "127.0.0.1", "::": "::1"}


def listening(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens there; a host with ":" is one of IPv6. Raises OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def is_of_this_machine(host: str) -> bool:
    """Whether only processes of this machine reach what listens there. A name that is not localhost may be any."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int, machine: str = "127.0.0.1") -> str:
    """The URL of what listens there. machine: the address to give if it listens at all those of IPv4."""
    reached = machine if host in ("", "0.0.0.0") else _REACHED.get(host, host)
    return f"http://[{reached}]:{port}/" if ":" in reached else f"http://{reached}:{port}/"

"""The Ray cluster that a job would join: whether it answers, which is asked within seconds, and how to join it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
from typing import NoReturn

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient

from fluidtune.errors import FluidTuneError

#: Seconds within which a head node takes a connection, and within which it answers a client. A head node that lives
#: does both in milliseconds; a Ray client waits up to eight minutes for one that has died.
CONNECT_S, ANSWER_S = 1.0, 3.0
#: What Ray says where a cluster's token is another one (its gRPC status, and its own word).
_NO_TOKEN = ("Unauthenticated", "UNAUTHENTICATED", "InvalidAuthToken", "AuthenticationError")


def cluster_of_jobs(address: str = "auto") -> str | None:
    """HOST:PORT of the cluster that ``ray.init()`` of a script would join: RAY_ADDRESS, or the one started here.

    ``address``: that of a certain cluster, in place of a job's. None: there is none, so a job begins one of its own.
    Raises FluidTuneError, within 4 s, for an address that is none and for a cluster that does not answer.
    """
    found_by_ray = address == "auto" and not os.environ.get("RAY_ADDRESS")
    logger = logging.getLogger("ray._private.services")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # it warns of each other cluster of the machine
        found = canonicalize_bootstrap_address(None if address == "auto" else address)
    except (ValueError, ConnectionError, OSError) as error:
        raise FluidTuneError(f"there is no Ray cluster at {_named(address)}: {error}") from None
    finally:
        logger.setLevel(level)
    if found is None or "://" in found:  # Ray Client's addresses are for Ray to ask
        return found
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        ended = "it has ended; `ray stop` forgets its address, and ends all that you run of Ray on this machine"
        remedy = ended if found_by_ray else "start it, or name another"
        said = f"does not answer ({error}): {remedy}"
        raise FluidTuneError(f"the Ray cluster at {_named(address, found)} {said}") from None
    told = _answer(found, found_by_ray)
    if told is not None:
        if any(word in told for word in _NO_TOKEN):
            told = "it wants a token that this user has not: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        raise FluidTuneError(f"the Ray cluster at {_named(address, found)} cannot be joined: {told}")
    return found


def join(address: str = "auto") -> bool:
    """Connect this process to the cluster of `cluster_of_jobs`. False: there is none.

    Raises FluidTuneError where it does not answer, or is of another version.
    """
    if cluster_of_jobs(address) is None:
        return False
    try:
        # ("auto" would take any cluster of this machine, also another user's.)
        ray.init(address=None if address == "auto" else address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # what Ray raises for a cluster of another version is of no class of its own
        said = " ".join(str(error).split()) or type(error).__name__
        raise FluidTuneError(f"the Ray cluster at {_named(address)} cannot be joined: {said}") from None
    return True


def _named(address: str, found: str | None = None) -> str:
    set_here = os.environ.get("RAY_ADDRESS")
    whose = f" (RAY_ADDRESS is {set_here!r})" if address == "auto" and set_here else ""
    return f"{found or address}{whose}"


def _answer(address: str, found_by_ray: bool) -> str | None:
    """What a client is told by the head node at ``address``; None: it is welcome.

    ``found_by_ray``: Ray sends its token unasked then. A child asks, as Ray's client can neither be
    given a time limit nor made silent.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _ask(address, write, found_by_ray)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], ANSWER_S)
        said = os.read(read, 1 << 16).decode(errors="replace") if ready else ""
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if said == "welcome":
        return None
    return " ".join(said.split()) or f"it takes connections, and answers no client within {ANSWER_S:g} s"


def _ask(address: str, write: int, found_by_ray: bool) -> NoReturn:
    """In the child: ask, and write the answer. What Ray prints is the answer where it ends in an error."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if found_by_ray:
            with contextlib.suppress(ImportError):  # before Ray 2.60 there are no tokens that are sent unasked
                from ray._private.authentication import authentication_token_setup

                authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        GcsClient(address=address).internal_kv_exists(b"fluidtune", False)
        said = "welcome"
    except BaseException as error:  # whatever it is, the parent says it
        said = f"{type(error).__name__}: {error}"
    os.write(write, said.encode()[: 1 << 15])
    os._exit(0)

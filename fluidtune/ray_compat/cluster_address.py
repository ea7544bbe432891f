"""The Ray cluster that a job would join: whether it answers, which is asked within seconds, and how to join it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._private.utils import get_ray_address_file, read_ray_address
from ray._raylet import GcsClient

from fluidtune.errors import FluidTuneError

#: Seconds within which a head node takes a connection, and within which it answers a client. A head node that lives
#: does both in milliseconds; a Ray client waits up to eight minutes for one that has died.
CONNECT_S, ANSWER_S = 1.0, 3.0
#: What Ray says where there is no token, or a cluster's is another one (its gRPC status, and its own words).
_NO_TOKEN = ("Unauthenticated", "UNAUTHENTICATED", "InvalidAuthToken", "AuthenticationError")
#: What each process of a job needs of the session's folder of its node. Without one of them Ray ends the process.
_NEEDED = (".", "artifacts", "logs/events", "logs/export_events", "sockets/plasma_store", "sockets/raylet")
_OF_ANOTHER_USER = "another Unix user runs it, and "


class CannotJoin(FluidTuneError):
    """``ray.init()`` of a job would fail after minutes, or end the process."""


def closed(session: Path) -> str | None:
    """Why this Unix user cannot join the node of this machine with this session's folder. None: it can."""
    needed = filter(os.path.exists, (session / name for name in _NEEDED))
    if all(os.access(path, os.W_OK | os.X_OK) for path in needed):
        return None
    return f"{_OF_ANOTHER_USER}{session} is not open to this one: see `fluidtune docs security`"


def of_token(told: str) -> str | None:
    """What a user hears of the cluster's token where Ray has ``told`` this; None: it is about something else."""
    if not any(word in told for word in _NO_TOKEN):
        return None
    return "this user has not its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file that has it"


def cluster_of_jobs(
    address: str = "auto", meanwhile: Callable[[], object] = lambda: None, temp_dir: str | None = None
) -> str | None:
    """HOST:PORT of the cluster that ``ray.init()`` of a script would join: RAY_ADDRESS, or the one started here.

    ``address``: that of a certain cluster, in place of a job's. None: there is none, so a job begins one of its own.
    ``meanwhile``: done while the cluster is waited for. ``temp_dir``: where Ray has it, if not where it usually does.
    Raises FluidTuneError, within 4 s, for an address that is none, and for a cluster that does not answer.
    """
    at = named = os.environ.get("RAY_ADDRESS") if address == "auto" else address
    try:
        at = at or read_ray_address(temp_dir)
        scheme, is_url, _ = (at or "").partition("://")
        if scheme in ("http", "https"):
            raise ValueError(f"{scheme}:// addresses are for `ray job` alone")
        found = at if at is None or is_url else canonicalize_bootstrap_address(at)
    except (ValueError, OSError) as error:
        remedy = "give HOST:PORT of the head node, such as 10.0.0.1:6379"
        raise FluidTuneError(f"there is no Ray cluster at {_named(address, at)}: {error}; {remedy}") from None
    if found is None or is_url:  # such addresses are for Ray to ask
        return found
    _reach(found, _named(address, found), None if named else get_ray_address_file(temp_dir))
    told = _answer(found, not named, meanwhile)
    if told is not None:
        refusal = CannotJoin if told.startswith(_OF_ANOTHER_USER) else FluidTuneError
        raise refusal(f"the Ray cluster at {_named(address, found)} cannot be joined: {of_token(told) or told}")
    return found


def refuse_unjoinable(temp_dir: str | None = None) -> None:
    """Raise `CannotJoin` where the cluster that ``ray.init()`` would join has ended, or is another user's.

    It has ended where Ray has found its address, and it refuses connections. One that takes them may be slow, and one
    that RAY_ADDRESS names may be about to start: Ray waits for both.
    """
    try:
        cluster_of_jobs(temp_dir=temp_dir)
    except FluidTuneError as error:  # Ray waits for such a cluster, or says what is wrong
        if isinstance(error, CannotJoin):
            raise


def _reach(found: str, named: str, file: str | None) -> None:
    """Raise FluidTuneError where nothing takes connections.

    ``file``: where Ray has read the address; None: a user has given it.
    """
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        remedy = f"it has ended; delete {file}, where Ray finds its address" if file else "start it, or name another"
        refusal = CannotJoin if file and isinstance(error, ConnectionRefusedError) else FluidTuneError
        raise refusal(f"the Ray cluster at {named} does not answer ({error}): {remedy}") from None


def join(address: str = "auto", meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Connect this process to the cluster of `cluster_of_jobs`. False: there is none.

    Raises FluidTuneError where it does not answer, or is of another version.
    """
    if cluster_of_jobs(address, meanwhile) is None:
        return False
    try:
        # ("auto" would take any cluster of this machine, also another user's.)
        ray.init(address=None if address == "auto" else address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # what Ray raises for a cluster of another version is of no class of its own
        said = " ".join(str(error).split()) or type(error).__name__
        raise FluidTuneError(f"the Ray cluster at {_named(address)} cannot be joined: {said}") from None
    return True


def _named(address: str, found: str | None = None) -> str:
    set_here = os.environ.get("RAY_ADDRESS") if address == "auto" else None
    return f"{found or set_here or address}" + (f" (RAY_ADDRESS is {set_here!r})" if set_here else "")


def _answer(address: str, found_by_ray: bool, meanwhile: Callable[[], object]) -> str | None:
    """What a client is told by the head node at ``address``; None: it is welcome.

    ``found_by_ray``: Ray sends its token unasked then. A child asks, as Ray's client can neither be
    given a time limit nor made silent.
    """
    read, write = os.pipe()
    until = time.monotonic() + ANSWER_S
    child = os.fork()
    if child == 0:
        _ask(address, write, found_by_ray)
    os.close(write)
    try:
        meanwhile()
        ready, _, _ = select.select([read], [], [], max(0.0, until - time.monotonic()))
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
        with contextlib.suppress(ImportError):  # before Ray 2.60 there are no tokens that are sent unasked
            from ray._private.authentication import authentication_token_setup as setup

            if found_by_ray:
                setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            setup.ensure_token_if_auth_enabled(create_token_if_missing=False)  # without one the client ends the process
        nodes = GcsClient(address=address).get_all_node_info().values()
        sockets = (Path(node.raylet_socket_name).parents for node in nodes if node.state == node.ALIVE)
        sessions = {folders[1] for folders in sockets if len(folders) > 1}
        shut = [closed(session) for session in sessions if os.path.exists(session)]
        said = str(shut[0]) if shut and all(shut) else "welcome"
    except BaseException as error:  # whatever it is, the parent says it
        said = f"{type(error).__name__}: {error}"
    os.write(write, said.encode()[: 1 << 15])
    os._exit(0)

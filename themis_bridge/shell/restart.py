"""The state in which the arbiter's process begins: by its books and by the reservations that exist."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from themis_bridge import messages as m
from themis_bridge.arbiter import Arbiter
from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu
from themis_bridge.settings import Settings
from themis_bridge.shell import reservations
from themis_bridge.shell.books_file import Books
from themis_bridge.shell.errands import Errands

logger = logging.getLogger(__name__)

#: What the state machine raises for books that are damaged or of another version.
BAD_BOOKS = (ThemisError, ValueError, TypeError, KeyError, AttributeError)


def restored(
    books: Books, errands: Errands, gpus: Iterable[Gpu], settings: dict[str, Any], wall: float
) -> tuple[Arbiter, list[m.Instruction], dict[str, dict[str, float]]]:
    """The arbiter, its first instructions, and the bundle of each app.

    Without usable books the arbiter is what the reservations alone tell. The first arbiter of a cluster is restored as
    well, so that its tokens and versions are above those of an arbiter that was stopped.

    Args:
        books: of the last arbiter; those that cannot be read are kept aside.
        errands: gets the groups that exist, and has to remove those that nobody can hold.
        gpus: in the cluster now.
        settings: changes to the default `Settings`, if there are no books.
        wall: time of day, s.
    """
    gpus = list(gpus)
    known = {gpu.id for gpu in gpus}
    there: dict[str, tuple[str, int]] = {}
    for key, (state, group) in sorted(reservations.found().items(), key=lambda each: each[0][2]):
        app, gpu, token = key
        (errands.there if state == reservations.CREATED else errands.found)[key] = group
        if gpu not in known:
            errands.remove(key)
            continue
        if gpu in there:
            # It could not be made, and was being removed.
            errands.remove((there[gpu][0], gpu, there[gpu][1]))
        there[gpu] = app, token
    newest = reservations.newest_token()
    data = books.read()
    bundles = data.pop("bundles", {})
    try:
        if not isinstance(bundles, dict):
            raise TypeError(f"bundles={bundles!r}: expected one for each app")
        arbiter, out = Arbiter.restored(data, there, gpus, wall, newest)
    except BAD_BOOKS as error:
        books.keep_aside(error)
        data, bundles = {}, {}
        arbiter, out = Arbiter.restored(data, there, gpus, wall, newest)
    if not data:
        arbiter.state.settings = Settings().changed(settings)
    logger.info("the arbiter begins: %d apps, %d reservations", len(arbiter.state.apps), len(there))
    return arbiter, out, bundles

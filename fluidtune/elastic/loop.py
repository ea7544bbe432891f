"""The three functions that a user's training loop calls. Without a session they do nothing.

Only a FluidTune worker has a session. Under stock Ray Tune or plain Python a script gets its own objects back, and
`range`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .current_session import current
from .data.plain_state import State


def prepare(*objects: Any) -> Any:
    """Hand over what the trial consists of: modules, optimizers, LR schedulers, DataLoaders, gradient scalers, random
    generators of the loop's own, and any other object with ``state_dict`` and ``load_state_dict``.

    A trial that is restarted has these as they were, and all else as it is when the code begins: put plain values, such
    as a counter of steps, into `state`. Before it goes on it runs one epoch again, of which Tune hears nothing. If that
    epoch makes something else than it did before, the loop carries more from epoch to epoch. Then the trial begins
    again where it would under stock Ray Tune, and an event names what differs. Of a DataLoader the generators and the
    settings of its samplers are kept, such as weights; not its data.

    What was prepared is kept until the trial ends: a cross-validation that prepares a model for each fold has the
    memory of all of them. Call it when the objects are on their device, and before `epochs`.

    Returns the same objects in the same order, as a tuple; a single object is returned alone.

    Raises:
        TypeError: an object has no ``state_dict`` and ``load_state_dict``, or a module is lazy.
    """
    session = current()
    if session is not None:
        session.prepare(*objects)
    return objects[0] if len(objects) == 1 else objects


def state(**values: Any) -> State:
    """Plain values of the loop that are part of the trial: a counter of steps, a weight that changes, a best loss.

        progress = elastic.state(steps=0)
        ...
        progress.steps += 1

    The values are attributes of what is returned: numbers, strings, tensors, lists and dicts of them, and what can be
    pickled. A trial that is restarted gets those of its last commit. Call it where `prepare` is called. An object of a
    class that the script itself defines, and of which no value is there when the loop begins, has a class of its own
    after `Tuner.restore`: define such a class in a module.

    Raises:
        TypeError: a name is ``state_dict`` or ``load_state_dict``.
    """
    made: State = prepare(State(**values))
    return made


def epochs(start: int, stop: int) -> Iterable[int]:
    """Yield start .. stop-1, without a length. Before each of them is a boundary, at which the trial may be committed.

    Call it in the outer loop only: inside another `epochs` it is a plain `range`.

    After a restart it goes on from the epoch of the last commit. If Tune has restored a newer checkpoint, or ``start``
    is beyond that epoch, the commit is not used. Loops are told apart by the order of these calls: a loop that is done
    by the user's own checkpoint is called as well, with ``start == stop``.
    """
    session = current()
    return range(start, stop) if session is None else session.epochs(start, stop, sys._getframe(1).f_code)

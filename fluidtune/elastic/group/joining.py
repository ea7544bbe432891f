"""How a joiner waits: for its host's request to enter a group, and then for the leader's call."""

from __future__ import annotations

from ..errors import Left, Refused
from ..transport.base import CollectiveBackend
from ..transport.membership import Reform
from .control_messages import HostRequests

#: Seconds that a joiner waits for the leader's call before it looks whether the host has asked for something else.
#: Judgement: short for a person who waits for a trial to end. Within this time the backend looks for the call far more
#: often.
_CALL_WAIT_S = 0.2


def called_in(requests: HostRequests, group: CollectiveBackend, worker: str) -> Reform:
    """Wait until the leader calls ``worker`` into a group, and return that group.

    Raises:
        Left: the host has asked the joiner to leave.
        Refused: the leader goes on without it.
        GroupLost: the leader is gone.
    """
    with requests.changed:
        requests.ready = True
        requests.changed.notify_all()
    announced: Reform | None = None
    while True:
        with requests.changed:
            requests.changed.wait_for(lambda: requests.leaving or requests.entry is not None)
            if requests.leaving:
                raise Left(f"worker {worker} was asked to leave before it had entered")
            reform = requests.entry
        assert reform is not None
        if reform is not announced:
            group.announce_joiner(reform.address, reform.generation, reform.members.index(worker))
            announced = reform
        if group.wait_for_call(reform.address, reform.generation, patience=_CALL_WAIT_S):
            called = group.called_members(reform.address, reform.generation)
            if called and worker not in called:
                raise Refused(f"the leader goes on without {worker}")
            return reform

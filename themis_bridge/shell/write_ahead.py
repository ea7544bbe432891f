"""Instructions on their way out of the arbiter's process: none leaves before the books have what it follows from.

The books are written at most once in a tick, because a thousand apps may join within a second. Instructions to agents
then lie in the agents' mail until these call; what is asked of Ray is handed on. Everything is called with the lock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from themis_bridge import messages as m
from themis_bridge.shell.books_file import Books


class WriteAhead:
    """See the module.

    books: where the state is written.
    saved: what has to be written.
    ask_ray: gets the instructions that are not for an app.
    """

    def __init__(self, books: Books, saved: Callable[[], Mapping[str, Any]], ask_ray: Callable[[m.Instruction], None]):
        self._books, self._saved, self._ask_ray = books, saved, ask_ray
        #: Instructions that wait until the books are written, in their order, by what a later one replaces.
        self.waiting: dict[Hashable, m.Instruction] = {}
        #: Session -> instructions that its agent has not fetched yet.
        self._mail: dict[str, deque[m.Instruction]] = defaultdict(deque)
        #: Whether the books must be written before the next instruction is carried out.
        self.unwritten = False

    def take(self, out: list[m.Instruction], write: bool) -> None:
        """Carry instructions out, in their order: now if the books have all that they follow from, else after a flush.

        ``write``: whether the event may have changed the books.
        """
        refused = [each for each in out if isinstance(each, m.Refused)]
        for each in refused:
            # Nothing in the books follows from it, and whoever joins waits for it.
            self._post(each)
        if out and len(refused) == len(out):
            return
        self.unwritten = self.unwritten or write
        for one in out:
            if not isinstance(one, m.Refused):
                # An app needs only the last message of each kind, so that nothing grows while the disk is full.
                key = (type(one), one.session) if isinstance(one, m.AppInstruction) else one
                self.waiting.pop(key, None)
                self.waiting[key] = one
        if not self.unwritten:
            self.flush()

    def flush(self) -> None:
        """Write the books if something in them has changed; then carry out what waits."""
        if self.unwritten and not self._books.write(self._saved()):
            return
        self.unwritten = False
        waiting, self.waiting = self.waiting, {}
        for each in waiting.values():
            if isinstance(each, m.AppInstruction):
                self._post(each)
            else:
                self._ask_ray(each)

    def _post(self, instruction: m.AppInstruction) -> None:
        mail = self._mail[instruction.session]
        if isinstance(instruction, m.Leases):
            # Of several messages about leases only the last one counts.
            mail = self._mail[instruction.session] = deque(each for each in mail if not isinstance(each, m.Leases))
        mail.append(instruction)

    def fetch(self, session: str) -> Iterable[m.Instruction]:
        """The mail of a session, which is empty then."""
        return self._mail.pop(session, deque())

    def forget_others(self, sessions: set[str]) -> None:
        """Forget the mail of all sessions but these; a refusal is fetched in the call that causes it."""
        for session in self._mail.keys() - sessions:
            del self._mail[session]

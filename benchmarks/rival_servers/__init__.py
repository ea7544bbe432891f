"""Other systems' rules on the same events, for comparisons on the twin. None of them is used for serving.

| baseline | rule |
| --- | --- |
| `nexus` | each GPU has models and batch sizes by a plan; requests are dealt out when they come |
| `clockwork` | a free GPU takes the batch that must start soonest, of all that any request could begin |
| `shepherd` | a free GPU takes the largest batch; a batch three times as large stops one that runs |
| `serve_batch` | first come first served; a batch starts when it is full or a time after its first request |
| `timeout` | our scheduler with batches that start a time after their first request came |
| `fifo` | our scheduler with batches by deadline, of which only hopeless heads are given up |
| `clipper` | first come first served, with a batch size that grows until it is too slow; nothing is refused |

Eager starts are a policy of the `Scheduler` itself. All run under ideal conditions: no delays, exact profiles. So they
do better here than the systems did.
"""

from typing import Protocol

from symphony_serve.messages import Event, Instruction


class Server(Protocol):
    """What decides about batches: the `Scheduler`, or a baseline."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened at ``now``."""

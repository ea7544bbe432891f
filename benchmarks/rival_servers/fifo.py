"""Batches in the order of deadlines; only what cannot be answered in time is given up (`GetBatch`, section 3.2)."""

from __future__ import annotations

from symphony_serve.batching.window import Window


class Fifo(Window):
    """The longest run of the earliest deadlines that ends before the first of them.

    A head that even a batch of 1 could not serve is given up. So a queue that has fallen behind is served in small
    batches, which makes it fall behind further; `window` avoids that.
    """

    def _gather(self, start: float) -> int:
        queue, one = self._queue, self._table[1]
        while self._head < len(queue) and start > queue[self._head][0] - one:
            self._give_up_head(start)
        return self._largest(start, 1) if self._head < len(queue) else 0

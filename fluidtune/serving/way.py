"""The way of a request through Ray Serve's proxy to the front and back. All times are seconds.

What a request spends on it counts against its SLO, and the front does not see it. A proxy that has much to do makes it
ten times as long as one that is idle. So the front asks itself one request after the other, as a client would.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections import deque

from fluidtune.serving.answers import WAY as PATH
from symphony_serve.shell.measuring import high_delay

#: Requests that measure the way at the start: its 99th percentile is then known, in less than a second.
FIRST = 100
#: Seconds between two requests while others come, and how many of the latest count. One takes the proxy and
#: the front 5 ms each, so that these take 4 % of a core; with the ways of 3 or 5 s instead of 10 s, more bursts of
#: `benchmarks.serve_http` were answered late.
EVERY_S, RECENT = 0.25, 40
#: Seconds between two looks for the front door, and seconds after which a request is given up.
LOOK_S, TIMEOUT_S = 0.1, 5.0


class Way:
    """Measures the way to the front door at ``host``:``port`` and back.

    body: of the requests, as large as an input. `first` comes first, then `watch`; `passed` is told each request.
    """

    def __init__(self, host: str, port: int, body: str, ends: threading.Event):
        self._host, self._port, self._body, self._ends = host, port, body, ends
        self._recent: deque[float] = deque(maxlen=RECENT)
        #: How many requests have passed; and the moment since which a request is on its way, None: none is.
        self._passed = 0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The way as it is now, which only one request in a hundred exceeds; 0 before `first`."""
        since, recent = self._since, list(self._recent)
        waits = time.monotonic() - since if since is not None else 0.0
        return max(high_delay(recent), waits) if recent else waits

    @property
    def least(self) -> float:
        """The shortest of the latest ways; 0 before `first`."""
        return min(self._recent, default=0.0)

    def passed(self) -> None:
        """A request has come. While none come, the way is not measured."""
        self._passed += 1

    def first(self) -> None:
        """Wait until the front is reached, and measure the way. Nothing is known if the front ends meanwhile."""
        if not self._door():
            return
        connection = self._connection()
        ways = [self._ask(connection) for _ in range(FIRST)]
        connection.close()
        self._recent.append(high_delay([one for one in ways if one is not None] or [TIMEOUT_S]))

    def watch(self) -> None:
        """Measure the way from now on, in a thread."""
        threading.Thread(target=self._keep_asking, name="serve-way", daemon=True).start()

    def _keep_asking(self) -> None:
        connection = self._connection()
        seen = after = 0
        while not self._ends.wait(EVERY_S):
            # After the start and after each request `RECENT` of them: then what is known is what holds without load.
            after = 0 if self._passed != seen else after + 1
            seen = self._passed
            if after > RECENT:
                continue
            self._since = time.monotonic()
            seconds = self._ask(connection)
            self._since = None
            if seconds is not None:
                self._recent.append(seconds)

    def _ask(self, connection: http.client.HTTPConnection) -> float | None:
        """Seconds of one request; None: the door was shut."""
        begin = time.monotonic()
        try:
            _post(connection, self._body)
        except TimeoutError:
            connection.close()
        except (OSError, http.client.HTTPException):
            connection.close()
            return None
        return time.monotonic() - begin

    def _door(self) -> bool:
        """Wait until this process is reached through Ray Serve: its first answers may be others'."""
        while not self._ends.wait(LOOK_S):
            connection = self._connection()
            try:
                if _post(connection, self._body) == 200:
                    return True
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
        return False

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


def _post(connection: http.client.HTTPConnection, body: str) -> int:
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status

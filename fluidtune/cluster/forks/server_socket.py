"""Where the fork server of this process is: the path of its socket, for processes that were forked by one.

A module of the server's own, which its children have as it is.
"""

from __future__ import annotations

#: None: this process was not forked by a fork server.
path: str | None = None

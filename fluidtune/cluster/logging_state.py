"""What a trial can change in Python's loggers and their handlers, and how it is put back.

Loggers that a trial has made cannot be removed, so they become as a new logger is. Handlers that a trial has added are
flushed and closed, as `logging.shutdown` does when a process ends.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

#: level, handlers, filters, propagate, disabled of a logger.
_Logger = tuple[int, list[Any], list[Any], bool, bool]
_NEW: _Logger = (logging.NOTSET, [], [], True, False)


class LoggingState:
    """The state of logging before a trial's code ran."""

    def __init__(self) -> None:
        self._loggers = {name: _state(logger) for name, logger in _loggers().items()}
        handlers = {each for _, handlers, *_ in self._loggers.values() for each in handlers}
        self._handlers = {each: (each.level, each.formatter, list(each.filters)) for each in handlers}
        self._disabled = logging.root.manager.disable

    def restore(self) -> None:
        """Put everything back. The handlers of a trial are closed."""
        if logging.root.manager.disable != self._disabled:
            logging.disable(self._disabled)
        gone = []
        for name, logger in _loggers().items():
            before = level, handlers, filters, propagate, disabled = self._loggers.get(name, _NEW)
            if _state(logger) != before:
                gone += [handler for handler in logger.handlers if handler not in self._handlers]
                logger.handlers[:], logger.filters[:] = handlers, filters
                logger.propagate, logger.disabled = propagate, disabled
                logger.setLevel(level)
        for handler, (level, formatter, filters) in self._handlers.items():
            handler.level, handler.formatter, handler.filters[:] = level, formatter, filters
        for handler in reversed(gone):
            with suppress(Exception):  # as in logging.shutdown: a handler's own trouble is nobody's here
                handler.flush()
                handler.close()


def _loggers() -> dict[str, logging.Logger]:
    """All loggers by name; "" is the root."""
    known = logging.root.manager.loggerDict
    return {"": logging.root, **{name: each for name, each in list(known.items()) if isinstance(each, logging.Logger)}}


def _state(logger: logging.Logger) -> _Logger:
    return logger.level, list(logger.handlers), list(logger.filters), logger.propagate, logger.disabled

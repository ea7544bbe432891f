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
#: level, formatter, filters of a handler.
_Handler = tuple[int, Any, list[Any]]
_NEW: _Logger = (logging.NOTSET, [], [], True, False)


class LoggingState:
    """The state of logging before a trial's code ran."""

    def __init__(self) -> None:
        self._loggers: dict[str, _Logger] = {}
        self._handlers: dict[Any, _Handler] = {}
        self._levels, self._names = dict(logging._levelToName), dict(logging._nameToLevel)
        self._disabled = logging.root.manager.disable
        self.note("")

    def note(self, package: str) -> None:
        """Take the loggers of a package as they are, unless they are known. "": all loggers."""
        for name, logger in _loggers().items():
            if name not in self._loggers and (not package or name.split(".")[0] == package):
                self._note(name, logger)

    def note_root(self) -> None:
        """Take the root logger as it is: a library has changed it while it was imported."""
        self._note("", logging.root)

    def root(self) -> _Logger:
        """The root logger as it is."""
        return _state(logging.root)

    def _note(self, name: str, logger: logging.Logger) -> None:
        self._loggers[name] = _state(logger)
        for handler in logger.handlers:
            self._handlers[handler] = (handler.level, handler.formatter, list(handler.filters))

    def restore(self) -> None:
        """Put everything back. The handlers of a trial are closed."""
        _refill(logging._levelToName, self._levels)
        _refill(logging._nameToLevel, self._names)
        if logging.root.manager.disable != self._disabled:
            logging.disable(self._disabled)
        gone = []
        for name, logger in _loggers().items():
            level, handlers, filters, propagate, disabled = self._loggers.get(name, _NEW)
            if _state(logger) == (level, handlers, filters, propagate, disabled):
                continue
            gone += [handler for handler in logger.handlers if handler not in self._handlers]
            logger.handlers[:], logger.filters[:] = handlers, filters
            logger.propagate, logger.disabled = propagate, disabled
            logger.setLevel(level)
        for handler, (level, formatter, filters) in self._handlers.items():
            handler.level, handler.formatter = level, formatter
            handler.filters[:] = filters
        for handler in reversed(gone):
            with suppress(Exception):  # as in logging.shutdown: a handler's own trouble is nobody's here
                handler.flush()
                handler.close()


def _refill(now: dict[Any, Any], was: dict[Any, Any]) -> None:
    if now != was:
        now.clear()
        now.update(was)


def _loggers() -> dict[str, logging.Logger]:
    """All loggers by name; "" is the root."""
    known = logging.root.manager.loggerDict
    return {"": logging.root, **{name: each for name, each in list(known.items()) if isinstance(each, logging.Logger)}}


def _state(logger: logging.Logger) -> _Logger:
    return logger.level, list(logger.handlers), list(logger.filters), logger.propagate, logger.disabled

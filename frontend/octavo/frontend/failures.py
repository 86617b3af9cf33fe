"""Faults of ours as they may stand in a log, where nothing of what clients send or get may stand."""

import logging
import sys


def log_failure(log: logging.Logger, message: str) -> None:
    """Logs the exception that is being handled: what kind it is and where it comes from, but not its own message, for
    that may quote the request."""
    error = sys.exception()
    log.error(message, exc_info=without_message(error) if error else None)


def without_message(error: BaseException) -> BaseException:
    """An exception of the same name, from the same place and for the same causes, that says nothing."""
    kind = type(error)
    silent: BaseException = type(kind.__name__, (Exception,), {"__module__": kind.__module__})()
    silent.__traceback__ = error.__traceback__
    silent.__cause__ = without_message(error.__cause__) if error.__cause__ else None
    silent.__context__ = without_message(error.__context__) if error.__context__ else None
    # Last, for a cause sets it.
    silent.__suppress_context__ = error.__suppress_context__
    return silent

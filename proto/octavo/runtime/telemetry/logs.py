"""Formats log lines for people, or as one JSON object each for programs."""

import atexit
import logging
import os
import sys
from types import TracebackType
from typing import Final, TextIO

import click
from pythonjsonlogger.json import JsonFormatter

from octavo.runtime.telemetry.optional import OUTPUT, failed, is_first_failure

_CONSOLE: Final = "%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s"
_JSON: Final = "%(levelname)s %(name)s %(process)d %(message)s"
_NAMES: Final = {"levelname": "level", "name": "logger", "process": "pid", "timestamp": "time"}
# Whatever could end a line or steer a terminal.
_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}

_log = logging.getLogger(__name__)


class ConsoleFormatter(logging.Formatter):
    """Formats each message as one line, whatever the message holds; tracebacks follow on lines of their own."""

    def __init__(self) -> None:
        super().__init__(_CONSOLE)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


class _Handler(logging.StreamHandler[TextIO]):
    """Counts lines that cannot be written, because a disk is full or the reader has gone, and does no more about
    them."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), OSError):
            if is_first_failure(OUTPUT):
                atexit.register(_drop_unwritten, self.stream)
        else:
            super().handleError(record)


def _drop_unwritten(stream: TextIO) -> None:
    """Keeps the interpreter from trying once more at its end, and making that a failure."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


def say(text: str) -> None:
    """Prints what is for people to read, to stdout. That it cannot be printed keeps nobody from serving."""
    try:
        click.echo(text)
    except OSError as error:
        failed(OUTPUT, error, "what is printed is lost")
        _drop_unwritten(sys.stdout)


def configure(level: str, log_format: str) -> None:
    """Sends what every library of this process logs to stderr, as `console` lines or as `json`; unless it has log
    handlers already."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(_json() if log_format == "json" else ConsoleFormatter())
    handler.addFilter(is_news)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    if log_format == "json":
        # gRPC's core writes to stderr by itself, in a form of its own.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        sys.excepthook = _log_uncaught


def is_news(record: logging.LogRecord) -> bool:
    """Returns False for what gRPC logs, with a traceback, of each client that left while its answer was being sent."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not (kind.__name__ == "ExecuteBatchError" and record.name.startswith("grpc"))


def is_json() -> bool:
    """Returns whether this process logs JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _json() -> logging.Formatter:
    return JsonFormatter(_JSON, rename_fields=_NAMES, timestamp=True)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("the process has failed", exc_info=(kind, error, trace))

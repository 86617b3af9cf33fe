"""One line per message, whatever a client made of it; one JSON object per line where programs read."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.runtime.telemetry.logs import ConsoleFormatter, configure, is_json, is_news

HOSTILE = 'a"b\nERROR octavo forged\r\x1b[31m\x85\u2028end\x00'


@contextmanager
def bare_logging() -> Iterator[None]:
    """A process that has no log handlers yet."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.excepthook = hook
        logging.captureWarnings(False)


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("octavo.test", logging.WARNING, "file.py", 1, message, arguments, None)


def test_a_console_line_stays_one_line_whatever_a_client_sent() -> None:
    line = ConsoleFormatter().format(record("request %s ended", HOSTILE))
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert "\\nERROR octavo forged\\r\\x1b[31m\\x85\\u2028end\\x00 ended" in line


def test_a_traceback_follows_on_lines_of_its_own() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        failed = record("it failed")
        failed.exc_info = sys.exc_info()
    lines = ConsoleFormatter().format(failed).splitlines()
    assert lines[0].endswith("it failed")
    assert lines[-1] == "ValueError: broken"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("grpc._cython.cygrpc", "ExecuteBatchError", False),
        ("grpc._cython.cygrpc", "ValueError", True),
        ("octavo.frontend", "ExecuteBatchError", True),
    ],
)
def test_a_client_that_left_is_no_news(name: str, kind: str, expected: bool) -> None:
    told = record("x")
    told.name, told.exc_info = name, (type(kind, (Exception,), {}), Exception(), None)
    assert is_news(told) is expected
    assert is_news(record("x"))


def test_every_json_line_is_one_object_of_any_logger(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_logging():
        configure("info", "json")
        assert is_json()
        logging.getLogger("octavo.frontend").info("request %s ended", HOSTILE)
        logging.getLogger("asyncio").warning("hello")
        logging.getLogger("octavo.frontend").debug("not shown")
        try:
            raise ValueError("broken\nin two lines")
        except ValueError:
            logging.getLogger("grpc._cython.cygrpc").exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["octavo.frontend", "asyncio", "grpc._cython.cygrpc"]
    assert [line["level"] for line in lines] == ["INFO", "WARNING", "ERROR"]
    assert lines[0]["message"] == f"request {HOSTILE} ended"
    assert "ValueError: broken" in lines[2]["exc_info"]
    assert all(line["pid"] == os.getpid() and line["time"] for line in lines)


def test_a_console_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_logging():
        configure("warning", "console")
        assert not is_json()
        logging.getLogger("octavo").warning("hello")
    assert capsys.readouterr().err.endswith(f" WARNING octavo[{os.getpid()}] hello\n")


def octavo(directory: Path, *arguments: str, script: str = "from octavo.cli.main import main; main()") -> list[str]:
    """What a process writes to stderr."""
    environment = {**os.environ, "OCTAVO_RUNTIME_DIR": str(directory)}
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    return result.stderr.splitlines()


def test_a_start_error_is_a_line_of_the_log(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    flags = ("scheduler", "--metrics-listen", "nowhere")
    (line,) = octavo(tmp_path, "--log-format", "json", *flags)
    said = "the scheduler cannot start: 'nowhere' is no address for metrics; use host:port"
    assert json.loads(line)["message"] == said
    assert octavo(tmp_path, *flags) == [f"Error: {said}"]


def test_a_process_that_fails_says_so_in_its_log(tmp_path: Path) -> None:
    script = (
        "from octavo.runtime.telemetry import logs; logs.configure('info', 'json'); raise ValueError('two\\nlines')"
    )
    (line,) = octavo(tmp_path, script=script)
    assert "ValueError: two\nlines" in json.loads(line)["exc_info"]

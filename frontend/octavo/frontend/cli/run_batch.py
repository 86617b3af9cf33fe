"""Implements `octavo run-batch`: has the calls in a file answered by a server, and writes the answers to another."""

import http.client
import itertools
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
import msgspec

from octavo.frontend.api.body import UNKNOWN_FIELDS_HEADER
from octavo.frontend.batch.answers import AnswerFile
from octavo.frontend.batch.lines import (
    BadLine,
    Line,
    answered_line,
    body_of,
    check_input,
    numbered_lines,
    read_line,
    unanswered_line,
)

_TIMEOUT_S: Final = 3600.0
_LATER: Final = frozenset({429, 503})
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 30.0
# Attempts to reach a server that is away: it may be restarting.
_ATTEMPTS: Final = 8
_SHOWN_ERRORS: Final = 20


class _Unreachable(Exception):
    """The server cannot be reached. The message says why."""


@dataclass(frozen=True)
class _Server:
    """Says where the server is, and what each call must carry."""

    host: str
    tls: ssl.SSLContext | None
    prefix: str
    headers: dict[str, str]

    def connect(self) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection(self.host, timeout=_TIMEOUT_S)
        return http.client.HTTPSConnection(self.host, timeout=_TIMEOUT_S, context=self.tls)


class _Caller:
    """Sends calls from several threads, each over a connection of its own."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._stopping = threading.Event()

    def close(self) -> None:
        """Ends all calls."""
        self._stopping.set()
        for connection in self._connections:
            with suppress(OSError):
                if connection.sock is not None:
                    # Whoever waits for an answer there is woken.
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def answer(self, line: Line) -> tuple[bytes, bool]:
        """Returns the line of a call's answer, and whether it is one. Raises `_Unreachable`."""
        try:
            body = body_of(line)
        except BadLine as error:
            return unanswered_line(line.custom_id, error.code, str(error)), False
        request_id = secrets.token_hex(16)
        pause_s = _FIRST_PAUSE_S
        while True:
            status, content, headers = self._send(line.url, body, request_id)
            if status not in _LATER:
                break
            if self._stopping.wait(max(_seconds(headers.get("retry-after")), pause_s)):
                raise _Unreachable("it has no room")
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        try:
            msgspec.json.decode(content)
        except msgspec.DecodeError:
            said = f"the server answered {status} without JSON: is this Octavo's HTTP address?"
            return unanswered_line(line.custom_id, "server_error", said), False
        ignored = headers.get(UNKNOWN_FIELDS_HEADER, "")
        return answered_line(line.custom_id, status, request_id, content, ignored), 200 <= status < 300

    def _send(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes, http.client.HTTPMessage]:
        headers = {**self._server.headers, "content-type": "application/json", "x-request-id": request_id}
        for attempt in range(_ATTEMPTS):
            connection = self._connection()
            try:
                connection.request("POST", self._server.prefix + path, body, headers)
                response = connection.getresponse()
                return response.status, response.read(), response.headers
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The server may have closed a connection that was idle; and who comes first is told at once.
                last = attempt == _ATTEMPTS - 1 or isinstance(error, ssl.SSLError) or self._stopping.is_set()
                if last or (attempt and self._stopping.wait(min(_FIRST_PAUSE_S * 2**attempt, _MOST_PAUSE_S))):
                    raise _Unreachable(str(error) or type(error).__name__) from error
        raise AssertionError("unreachable")

    def _connection(self) -> http.client.HTTPConnection:
        """Returns this thread's connection, which opens itself again after it was closed."""
        if not hasattr(self._own, "connection"):
            self._own.connection = self._server.connect()
            self._connections.append(self._own.connection)
        found: http.client.HTTPConnection = self._own.connection
        return found


@click.command("run-batch")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File of answers.")
@click.option("--url", envvar="OCTAVO_URL", default="http://127.0.0.1:8000", help="HTTP address of a frontend.")
@click.option("--concurrency", type=click.IntRange(1, 1024), default=32, help="Calls that are under way at once.")
@click.option(
    "--ca-certificate",
    envvar="OCTAVO_CA_CERTIFICATE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="PEM file of the authority that the server's certificate is of. Default: those of the system.",
)
@click.option("--api-key", envvar="OCTAVO_API_KEY", help="Where the server asks for one; better not on the line.")
def run_batch(
    file: Path, output: Path, url: str, concurrency: int, ca_certificate: Path | None, api_key: str | None
) -> None:
    """Have the calls in FILE answered, one JSON object a line as OpenAI's Batch API has them, and write a line for each
    to the output.

    Answers are written as they come. Calls that the output has already are not sent again, so the same command goes on
    after an interruption.
    """
    server = _server(url, ca_certificate, api_key)
    total = _check(file)
    _reach(server, url)
    try:
        answers = AnswerFile(output)
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from error
    with closing(answers):
        done = _done(answers, output)
        caller = _Caller(server)
        try:
            failed = _answer_all(caller, file, done, total, concurrency, answers)
            answers.sync()
        except _Unreachable as error:
            said = f"{url} does not answer: {error}; the same command goes on with what is left"
            raise click.ClickException(said) from error
        except OSError as error:
            said = f"{output} cannot be written: {error.strerror}; the same command goes on with what is left"
            raise click.ClickException(said) from error
    click.echo(
        f"{total} calls: {len(done)} were answered before, {total - len(done)} are now, of which {failed} failed"
    )


def _server(url: str, ca_certificate: Path | None, api_key: str | None) -> _Server:
    found = urlsplit(url)
    if found.scheme not in ("http", "https") or not found.netloc:
        raise click.UsageError(f"{url!r} is no address; write http://HOST:PORT")
    if ca_certificate is not None and found.scheme == "http":
        raise click.UsageError("--ca-certificate is for an encrypted connection; write https://HOST:PORT")
    try:
        tls = ssl.create_default_context(cafile=ca_certificate) if found.scheme == "https" else None
    except ssl.SSLError as error:
        raise click.UsageError(f"{ca_certificate} holds no certificate: {error}") from error
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return _Server(found.netloc, tls, found.path.rstrip("/").removesuffix("/v1"), headers)


def _reach(server: _Server, url: str) -> None:
    """Raises `click.ClickException` where nothing answers: later, a server that is away may be restarting."""
    connection = server.connect()
    try:
        connection.connect()
    except OSError as error:
        raise click.ClickException(f"{url} does not answer: {error}; is the server started?") from error
    finally:
        connection.close()


def _check(file: Path) -> int:
    """Returns the number of calls. Raises `click.ClickException` with the lines that are none."""
    try:
        checked = check_input(file, None)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be read: {error.strerror}") from error
    if checked.errors:
        shown = [f"line {each.line}: {each.message}" if each.line else each.message for each in checked.errors]
        more = len(shown) - _SHOWN_ERRORS
        lines = [*shown[:_SHOWN_ERRORS], *([f"and {more} more"] if more > 0 else [])]
        raise click.ClickException(f"{file} is no batch, and nothing was sent:\n" + "\n".join(lines))
    return checked.num_lines


def _done(answers: AnswerFile, output: Path) -> set[str]:
    try:
        return answers.custom_ids()
    except msgspec.MsgspecError as error:
        raise click.ClickException(f"{output} holds something else than answers; name another file") from error


def _answer_all(caller: _Caller, file: Path, done: set[str], total: int, concurrency: int, answers: AnswerFile) -> int:
    """Has all calls answered that are not `done`; returns how many have failed. Raises `_Unreachable`, `OSError`."""
    failed = 0
    lines = _lines(file, done)
    with (
        ThreadPoolExecutor(concurrency) as threads,
        click.progressbar(length=total, label="calls", file=sys.stderr) as bar,
    ):
        bar.update(len(done))
        running: set[Future[tuple[bytes, bool]]] = set()
        try:
            while running := running | {
                threads.submit(caller.answer, line) for line in itertools.islice(lines, concurrency - len(running))
            }:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    content, is_fine = future.result()
                    answers.append(content)
                    failed += not is_fine
                    bar.update(1)
        finally:
            caller.close()
            threads.shutdown(cancel_futures=True)
    return failed


def _lines(file: Path, done: set[str]) -> Iterator[Line]:
    with file.open("rb") as content:
        for _, text in numbered_lines(content):
            if text is not None and (line := read_line(text, None)).custom_id not in done:
                yield line


def _seconds(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0

"""A relay before the service, for clients that offer no way to say what a test needs: it adds fields to what they ask,
and keeps both sides' words. What they send and what they are sent is otherwise as without it."""

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

# They belong to one connection, or are of a body that is no longer the same.
_OWN = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"}


@dataclass
class Exchange:
    """A request as the client wrote it, and the answer."""

    asked: dict[str, Any]
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    answer: bytes = b""

    def events(self) -> list[dict[str, Any]]:
        """Of an answer that is a stream."""
        lines = self.answer.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    @property
    def not_honoured(self) -> str:
        return self.headers.get("x-octavo-unknown-fields", "")


@dataclass
class Relay:
    """`address` is host:port; `exchanges` are those with a body of JSON, in the order they were begun."""

    address: str
    exchanges: list[Exchange]


@contextmanager
def relay(service: str, add: Callable[[dict[str, Any]], Mapping[str, object]]) -> Iterator[Relay]:
    """Stands before the service at host:port; `add` says which fields a body gets."""
    exchanges: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        """One request. Every connection ends with its answer, whose end needs no other sign then."""

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            self._pass_on(b"", None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = json.loads(body)
            exchanges.append(exchange := Exchange(asked))
            self._pass_on(json.dumps({**asked, **add(asked)}).encode(), exchange)

        def _pass_on(self, body: bytes, exchange: Exchange | None) -> None:
            connection = http.client.HTTPConnection(service)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OWN:
                    self.send_header(name, value)
            self.end_headers()
            if exchange:
                exchange.status = answer.status
                exchange.headers = {name.lower(): value for name, value in answer.getheaders()}
            try:
                while part := answer.read1(1 << 16):
                    if exchange:
                        exchange.answer += part
                    self.wfile.write(part)
            except ConnectionError:
                # The client has gone; so does the relay.
                self.close_connection = True
            finally:
                connection.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield Relay(f"127.0.0.1:{server.server_address[1]}", exchanges)
        finally:
            server.shutdown()
            thread.join()

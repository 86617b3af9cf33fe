"""A frontend: the production session, journals and answers; its socket's part is written after `SchedulerClient`."""

from collections.abc import Callable

import msgspec
import zmq

from octavo.frontend.scheduler.client import unreachable
from octavo.frontend.scheduler.session import SchedulerSession
from octavo.testing.simulation.client import Client
from octavo.testing.simulation.clock import NEVER, Process
from octavo.testing.simulation.network import Dealer, Network
from octavo.testing.simulation.workload import ClientPlan
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.codec import decode_to_frontend, encode
from octavo.wire.requests import RENEW_INTERVAL_S, Abort, FromFrontend, FrontendHello

_HELLO_INTERVAL_S = 0.2


class OtherVersionSession(SchedulerSession):
    """Speaks another schema, as a release of another version does."""

    def hello(self) -> FrontendHello:
        return msgspec.structs.replace(super().hello(), schema_version=SCHEMA_VERSION + 1)


class FrontendProcess(Process):
    """Runs one life of the frontend at a place. It calls `ended` for every client that is served or has failed, and
    `refused` when the scheduler will not have it. What it says of requests that are over may never leave
    (`loses_aborts`)."""

    def __init__(
        self,
        network: Network,
        place: str,
        session: SchedulerSession,
        grace_s: float,
        ended: "Callable[[FrontendProcess, Client], None]",
        refused: "Callable[[FrontendProcess, str], None]",
        *,
        loses_aborts: bool,
    ) -> None:
        super().__init__(network.clock, place)
        self._network = network
        self.dealer = Dealer(network, "frontends", place, self)
        self.session = session
        # Those that came while it stood still, and those that it serves.
        self.knocking: list[ClientPlan] = []
        self.clients: list[Client] = []
        self._grace_s = grace_s
        self._ended = ended
        self._refused = refused
        self._loses_aborts = loses_aborts
        self._ticks_at = self.clock.now
        self.wake()

    def turn(self) -> float:
        while self.dealer.has_arrived:
            message = decode_to_frontend(*self.dealer.recv_multipart())
            self._send(self.session.receive(message, self.clock.now))
            assert self.session.epoch is None or not isinstance(self.session, OtherVersionSession), "it is not refused"
            if self.session.refused is not None:
                self._refused(self, self.session.refused)
                return NEVER
        if self.clock.now >= self._ticks_at:
            self._tick()
        for client in list(self.clients):
            self._serve(client)
        return self._ticks_at

    def submit(self, client: Client) -> None:
        self.clients.append(client)
        self._send(self.session.submit(client, self.clock.now))

    def release(self, client: Client) -> None:
        """The client has all it wanted, or has gone."""
        self.clients.remove(client)
        self._send(self.session.release(client))

    def _serve(self, client: Client) -> None:
        self._send(client.advance(self.session))
        if client.is_served or client.failure:
            self.release(client)
            self._ended(self, client)

    def _tick(self) -> None:
        self._send(self.session.tick())
        away_s = self.clock.now - self.session.last_heard
        if away_s > self._grace_s:
            for client in self.clients:
                client.give_up(unreachable(away_s))
        self._ticks_at = self.clock.now + (RENEW_INTERVAL_S if self.session.epoch is not None else _HELLO_INTERVAL_S)

    def _send(self, messages: list[FromFrontend]) -> None:
        for message in messages:
            if self._loses_aborts and isinstance(message, Abort):
                self._network.counts["aborts lost"] += 1
                continue
            try:
                self.dealer.send(encode(message))
            except zmq.Again:
                self.session.disconnected()
                return

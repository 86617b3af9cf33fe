"""A frontend: the production session, journals and answers; its socket's part is written after `SchedulerClient`."""

from collections.abc import Callable

import zmq

from octavo.frontend.scheduler_client import unreachable
from octavo.frontend.scheduler_session import SchedulerSession
from octavo.testing.simulation.client import Client
from octavo.testing.simulation.clock import Process
from octavo.testing.simulation.network import Dealer, Network
from octavo.testing.simulation.workload import ClientPlan
from octavo.wire.codec import decode_to_frontend, encode
from octavo.wire.requests import RENEW_INTERVAL_S, FromFrontend

_HELLO_INTERVAL_S = 0.2


class FrontendProcess(Process):
    """One life of the frontend at a place. `ended` is told of every client that is served or has failed."""

    def __init__(
        self,
        network: Network,
        place: str,
        session: SchedulerSession,
        grace_s: float,
        ended: "Callable[[FrontendProcess, Client], None]",
    ) -> None:
        super().__init__(network.clock, place)
        self.dealer = Dealer(network, "frontends", place, self)
        self.session = session
        # Those that came while it stood still, and those that it serves.
        self.knocking: list[ClientPlan] = []
        self.clients: list[Client] = []
        self._grace_s = grace_s
        self._ended = ended
        self._ticks_at = self.clock.now
        self.wake()

    def turn(self) -> float:
        while self.dealer.has_arrived:
            message = decode_to_frontend(*self.dealer.recv_multipart())
            self._send(self.session.receive(message, self.clock.now))
            assert self.session.refused is None, f"the frontend was refused: {self.session.refused}"
        if self.clock.now >= self._ticks_at:
            self._tick()
        for client in list(self.clients):
            self._serve(client)
        return self._ticks_at

    def submit(self, client: Client) -> None:
        self.clients.append(client)
        self._send(self.session.submit(client.live, self.clock.now))

    def release(self, client: Client) -> None:
        """The client has all it wanted, or has gone."""
        self.clients.remove(client)
        self._send(self.session.release(client.live))

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
                client.fail(unreachable(away_s))
        self._ticks_at = self.clock.now + (RENEW_INTERVAL_S if self.session.epoch is not None else _HELLO_INTERVAL_S)

    def _send(self, messages: list[FromFrontend]) -> None:
        for message in messages:
            try:
                self.dealer.send(encode(message))
            except zmq.Again:
                self.session.disconnected()
                return

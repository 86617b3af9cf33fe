"""Bounds on requests and on tokens of work, kept at the door before anything is spent on a request."""

from octavo.frontend.config import FrontendConfig
from octavo.frontend.request import GenerationRequest


class Ticket:
    """One request's share of what is admitted. Must be released, whatever becomes of the request."""

    def correct(self, tokens: int) -> None:
        """Its work is so many tokens, now that its prompt is tokenized and its limits are resolved."""

    def progress(self, tokens: int) -> None:
        """So many tokens of its work are done."""

    def release(self) -> None:
        """It has ended. Idempotent."""


class Admission:
    """The books of one frontend. Belongs to one event loop."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config

    def admit(self, request: GenerationRequest, tenant: str) -> Ticket:
        """Takes the request in, by an estimate of its work from its form alone.

        Raises `Overloaded`, with the time after which there should be room.
        """
        return Ticket()

"""Computes a response that nobody waits for."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.frontend.api.endpoint import IndexedEvent
from octavo.frontend.errors import Aborted, ServiceError, internal_error, log_failure
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.response_answer import ResponseAnswer
from octavo.frontend.stored.values import Progress, split

_log = logging.getLogger(__name__)


class BackgroundRun:
    """Computes one response. Events wait here until they are written, the first of them with the number `first`."""

    def __init__(self, answer: ResponseAnswer, events: AsyncGenerator[IndexedEvent]) -> None:
        self.answer = answer
        self.first = 0
        self.ended = False
        # What ended it, but for its answer's end or its client's wish.
        self.error: ServiceError | None = None
        self._tail: list[bytes] = split(answer.queue())
        self._status_offered = self._status_written = answer.response["status"]
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self.task = asyncio.create_task(self._compute(events))

    @property
    def num_events(self) -> int:
        """Returns how many events there were so far."""
        return self.first + len(self._tail)

    def stop(self, error: ServiceError | None = None) -> None:
        """Ends the response with `error`, or without one as cancelled, unless it has ended."""
        self.error = self.error or error
        self.task.cancel()

    def since(self, number: int) -> list[bytes]:
        """Returns the events from `number` on, which is not below `first`."""
        return self._tail[number - self.first :]

    async def changed(self) -> None:
        """Returns with the next events, or with the end."""
        if not self.ended:
            await self._news.wait()

    async def over(self) -> None:
        """Returns once the response has ended."""
        await self._ended.wait()

    def progress(self, key: int) -> Progress:
        """Returns what is to be written."""
        status = self.answer.response["status"]
        body = encode(self.answer.response) if self.ended or status != self._status_written else None
        self._status_offered = status
        return Progress(key, self.first, tuple(self._tail), body, self.ended)

    def written(self, progress: Progress) -> None:
        """Notes that `progress` was written."""
        self._status_written = self._status_offered
        del self._tail[: len(progress.events)]
        self.first += len(progress.events)

    async def _compute(self, events: AsyncGenerator[IndexedEvent]) -> None:
        answer = self.answer
        try:
            async with aclosing(events):
                async for _, event in events:
                    self._add(answer.take(event))
            last = answer.finish()
        except asyncio.CancelledError:
            last = answer.fail(self.error) if self.error else answer.cancel()
        except Aborted:
            last = answer.cancel()
        except ServiceError as error:
            self.error, last = error, answer.fail(error)
        except Exception:
            log_failure(_log, "a response failed that is computed in the background")
            self.error = internal_error()
            # It may be what there is of the answer that cannot be encoded.
            answer.forget()
            last = answer.fail(self.error)
        self.ended = True
        self._add(last)
        self._ended.set()

    def _add(self, events: bytes) -> None:
        if added := split(events):
            self._tail += added
            self._news.set()
            self._news.clear()

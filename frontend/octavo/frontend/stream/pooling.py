"""Makes the events of requests for outputs of the model, and runs many of them for one call."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from octavo.frontend.errors import Broken
from octavo.frontend.request.events import Emitted, Event, OutputReady, RequestNotice, RequestUsage
from octavo.frontend.request.pooling import PoolingRequest
from octavo.frontend.scheduler.journal import Journal

# Texts of one call that are at the scheduler at a time: more than two steps hold, and few enough that the queue stays
# short for others.
_AT_ONCE: Final = 128


class OutputAnswer:
    """Makes the events of a request for an output from its journal, as `octavo.frontend.stream.answer.Answer` does of
    generated tokens: `OutputReady`, then `RequestUsage`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.num_tokens = 0
        self.behind = False
        self.ended_here: list[int] = []
        self.fault: Broken | None = None
        self._made: list[Emitted] = []
        self._finished = False

    @property
    def num_events(self) -> int:
        """Returns how many events were made."""
        return len(self._made)

    @property
    def has_begun(self) -> bool:
        """Tells whether the output was made."""
        return self._finished

    @property
    def finished(self) -> bool:
        """Tells whether all events were made."""
        return self._finished

    def advance(self, notices: Iterable[RequestNotice] = ()) -> list[Emitted]:
        """Returns `notices`, and once the output is there the other events."""
        events: list[Event] = [*notices]
        if not self._finished and (values := self.journal.pooled) is not None:
            self._finished = True
            events += [OutputReady(values, len(self.journal.prompt_token_ids)), self.usage()]
        emitted = [Emitted(len(self._made) + place, event) for place, event in enumerate(events, 1)]
        self._made += emitted
        return emitted

    def sent_after(self, offset: int) -> Iterator[list[Emitted]]:
        """Yields the events after `offset` that were made already."""
        yield self._made[offset:]

    def usage(self) -> RequestUsage:
        """Returns what the request has taken so far."""
        journal = self.journal
        done_at = journal.arrived_at if journal.first_token_at is None else journal.first_token_at
        return RequestUsage(
            prompt_tokens=len(journal.prompt_token_ids),
            completion_tokens=0,
            preemptions=journal.preemptions,
            swaps=journal.swaps,
            cached_prompt_tokens=journal.cached_prompt_tokens,
            time_to_first_token_s=done_at - journal.arrived_at,
            decode_time_s=0.0,
        )


@dataclass(frozen=True)
class Output:
    """Holds an output of the model, as little-endian fp32 numbers, the tokens of its text, and how many of them were
    found computed."""

    values: bytes
    prompt_tokens: int
    cached_tokens: int


Run = Callable[[PoolingRequest], AsyncGenerator[Emitted]]


async def outputs(run: Run, requests: Sequence[PoolingRequest]) -> list[Output]:
    """Runs all requests, some at a time, and returns their outputs in order.

    Raises the `ServiceError` of the first that fails; the others end with it, as all do if the call is cancelled.
    """
    room = asyncio.Semaphore(_AT_ONCE)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request in requests:
                await room.acquire()
                task = group.create_task(_output(run, request))
                task.add_done_callback(lambda _: room.release())
                tasks.append(task)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _output(run: Run, request: PoolingRequest) -> Output:
    ready, usage = None, None
    async with contextlib.aclosing(run(request)) as events:
        async for _, event in events:
            if isinstance(event, OutputReady):
                ready = event
            elif isinstance(event, RequestUsage):
                usage = event
    assert ready, "a request that ends without an error has its output"
    assert usage, "a request that has an output has its usage"
    return Output(ready.values, ready.prompt_tokens, usage.cached_prompt_tokens)

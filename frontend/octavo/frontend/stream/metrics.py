"""Collects the frontend's metrics: requests of every interface, and the state of each cell behind the frontend."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.frontend.access.admission import Admission
from octavo.frontend.errors import Reason, ServiceError
from octavo.frontend.request.events import RequestUsage
from octavo.frontend.scheduler.client import SchedulerAvailability
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.scheduler.pool import SchedulerPool
from octavo.frontend.stream.observer import Latencies, Observer
from octavo.runtime.telemetry.numbers import LONG_S, SHORT_S, WAIT_S, Histogram, Tally, counter, gauge, gauges
from octavo.wire.requests import FinishReason, ServiceLoad

_LAG_INTERVAL_S: Final = 0.1
# Without keys clients name tenants as they like: those that come after so many others are counted as one.
_MAX_TENANTS: Final = 100
_OTHERS: Final = "other tenants"
# What endpoint pickers read: the load of all cells together, of no tenant.
LOAD_METRICS: Final = frozenset(
    {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"}
)


class FrontendMetrics(Observer, Collector):
    """Counts requests and exposes the counts. All methods belong to the event loop."""

    def __init__(self, model_name: str, admission: Admission, journals: Callable[[], Collection[Journal]]) -> None:
        self._model = {"model_name": model_name}
        self._admission = admission
        self._journals = journals
        self._tenants_named: set[str] = set()
        self._arrived = self._finished = self._left = 0
        self._refused, self._failed = Tally(*Reason), Tally(*Reason)
        self._ended = Tally(*(reason.name.lower() for reason in FinishReason))
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._first_token, self._between_tokens = Histogram(WAIT_S), Histogram(SHORT_S)
        self._whole, self._lag = Histogram(LONG_S), Histogram(SHORT_S)

    # -- counting ---------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        self._arrived += 1

    def refused(self, error: ServiceError) -> None:
        self._refused.add(error.reason.value)

    def prompt_tokens(self, count: int, cached: int) -> None:
        self._prompt_tokens += count
        self._cached_tokens += cached

    def first_token(self, since_arrival_s: float) -> None:
        self._first_token.observe(since_arrival_s)

    def tokens(self, count: int, since_last_s: float | None) -> None:
        self._generated_tokens += count
        if since_last_s is not None and count:
            # Tokens that came together share the time: each is a token that somebody waited for.
            self._between_tokens.observe(since_last_s / count, count)

    def sequence_finished(self, reason: FinishReason) -> None:
        self._ended.add(reason.name.lower())

    def finished(self, usage: RequestUsage, since_arrival_s: float) -> None:
        self._finished += 1
        self._whole.observe(since_arrival_s)

    def failed(self, error: ServiceError) -> None:
        self._failed.add(error.reason.value)

    def left(self) -> None:
        self._left += 1

    async def measure_lag(self) -> None:
        """Measures, until cancelled, how late the event loop runs what is due."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def latencies(self) -> Latencies:
        return Latencies(*self._first_token.total, *self._between_tokens.total)

    # -- exposing ---------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._tokens()
        yield from self._times()
        yield from self._held()
        yield from self._aliases()

    @property
    def _in_flight(self) -> float:
        return self._arrived - self._finished - self._left - self._refused.total - self._failed.total

    def _requests(self) -> Iterator[Metric]:
        yield gauge("octavo_requests_in_flight", "Requests that have come and not ended.", self._in_flight)
        yield counter("octavo_requests_arrived", "Requests that came through any door.", self._arrived)
        yield counter("octavo_requests_finished", "Requests answered to their end.", self._finished)
        yield self._refused.family("octavo_requests_refused", "Requests that ended before anything was sent.", "reason")
        yield self._failed.family("octavo_requests_failed", "Requests that ended in the middle of an answer.", "reason")
        yield counter("octavo_requests_left", "Requests whose client went away.", self._left)
        yield self._ended.family("octavo_sequences_finished", "Sequences of answers, by why they ended.", "reason")

    def _tokens(self) -> Iterator[Metric]:
        yield counter("octavo_prompt_tokens", "Tokens of prompts of requests that were begun.", self._prompt_tokens)
        yield counter("octavo_cached_prompt_tokens", "Those of them found computed already.", self._cached_tokens)
        yield counter("octavo_generated_tokens", "Tokens of answers.", self._generated_tokens)

    def _times(self) -> Iterator[Metric]:
        first, between, whole = self._first_token, self._between_tokens, self._whole
        yield first.family("octavo_time_to_first_token_seconds", "From a request's arrival to its first token.")
        yield between.family("octavo_inter_token_latency_seconds", "From one token of a request to its next.")
        yield whole.family("octavo_request_latency_seconds", "From a request's arrival to its last event.")
        yield self._lag.family("octavo_event_loop_lag_seconds", "How late the event loop is with what is due.")

    def _held(self) -> Iterator[Metric]:
        journals, admission = self._journals(), self._admission
        yield gauge("octavo_journal_requests", "Requests in the scheduler's hands, kept to run again.", len(journals))
        yield gauge(
            "octavo_journal_tokens", "Tokens kept of them, of prompts and answers.", sum(map(_tokens, journals))
        )
        yield gauge("octavo_admitted_requests", "Requests that count against --max-requests.", admission.requests)
        yield gauge("octavo_admitted_work_tokens", "Tokens that they are still about to take.", admission.work_tokens)
        yield gauge("octavo_service_rate_tokens_per_second", "What retry delays reckon with.", admission.service_rate)
        yield self._tenants()

    def _tenants(self) -> Metric:
        tokens: Counter[str] = Counter()
        for name, held in self._admission.tenants.items():
            tokens[self._label(name)] += held.work_tokens
        rows = (([name], count) for name, count in tokens.items())
        return gauges("octavo_tenant_work_tokens", "The same of each tenant that has any.", ["tenant"], rows)

    def _label(self, tenant: str) -> str:
        if len(self._tenants_named) < _MAX_TENANTS:
            self._tenants_named.add(tenant)
        return tenant if tenant in self._tenants_named else _OTHERS

    def _aliases(self) -> Iterator[Metric]:
        """Yields metrics under vLLM's names, which dashboards and autoscalers know."""
        text, labels = "The same as its namesake of Octavo.", self._model
        yield self._first_token.family("vllm:time_to_first_token_seconds", text, labels)
        yield self._between_tokens.family("vllm:inter_token_latency_seconds", text, labels)
        yield self._whole.family("vllm:e2e_request_latency_seconds", text, labels)
        yield counter("vllm:prompt_tokens", text, self._prompt_tokens, labels)
        yield counter("vllm:generation_tokens", text, self._generated_tokens, labels)


def _tokens(journal: Journal) -> int:
    return len(journal.prompt_token_ids) + sum(len(sequence.token_ids) for sequence in journal.sequences)


class CellMetrics(Collector):
    """Exposes the state of each cell, named by its scheduler's endpoint, and under vLLM's names the load of all
    together. Belongs to the event loop."""

    def __init__(self, model_name: str, cells: SchedulerPool) -> None:
        self._model = {"model_name": model_name}
        self._cells = cells

    def collect(self) -> Iterator[Metric]:
        links = self._cells.links
        ready = [([link.endpoint], link.availability is SchedulerAvailability.READY) for link in links]
        requests = [([link.endpoint], len(link.live)) for link in links]
        work = [([link.endpoint], link.work_tokens) for link in links]
        yield gauges("octavo_cell_ready", "Whether a cell has workers of our model that answer.", ["cell"], ready)
        yield gauges("octavo_cell_requests", "This frontend's requests in a cell.", ["cell"], requests)
        yield gauges("octavo_cell_work_tokens", "Tokens a cell is reckoned to compute yet.", ["cell"], work)
        ages = [([link.endpoint], link.status_age_s) for link in links if link.status]
        yield gauges("octavo_cell_status_age_seconds", "Since a cell's scheduler told its state.", ["cell"], ages)
        yield counter("octavo_cell_handovers", "Requests that another cell was to go on with.", self._cells.handovers)
        loads = [load for link in links if (load := link.service_load)]
        # All of them or none: who chooses endpoints takes what it knew for fresh if any of them comes.
        if loads:
            yield from self._load(loads)

    def _load(self, loads: Sequence[ServiceLoad]) -> Iterator[Metric]:
        num_blocks, num_used = Counter[int](), 0
        for use in (use for load in loads for use in load.blocks):
            num_blocks[use.block_size] += use.num_blocks
            num_used += use.num_used
        # Where there is no block, none is free.
        usage = num_used / num_blocks.total() if num_blocks.total() else 1.0
        waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
        labels = self._model
        yield gauge("vllm:num_requests_waiting", "Requests of all frontends that wait in the cells.", waiting, labels)
        yield gauge("vllm:num_requests_running", "Requests of all frontends that run in the cells.", running, labels)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the cells' KV blocks in use, 0 to 1.", usage, labels)
        # Some readers look at the first row alone: that of the size with most blocks.
        rows = [((str(size), str(count)), 1.0) for size, count in num_blocks.most_common()]
        text = "Always 1; the blocks of each size, of all workers of the cells."
        yield gauges("vllm:cache_config_info", text, ["block_size", "num_gpu_blocks"], rows)

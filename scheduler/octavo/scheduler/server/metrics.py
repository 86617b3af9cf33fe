"""The scheduler's metrics and traces: counts of what its core did, its books as the loop published them last, and a
span for each traced request.

The core counts, the loop publishes, and scrapers read on threads of their own: numbers, and a message that is replaced
whole. Neither side ever waits for the other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.runtime.telemetry.numbers import SHORT_S, SIZES, WAIT_S, Histogram, Tally, counter, counters, gauge, gauges
from octavo.runtime.telemetry.tracing import Span, start_span
from octavo.scheduler.core.events import LossCause, SchedulerObserver
from octavo.scheduler.core.speculation.draft import DraftSource
from octavo.v1 import admin_pb2 as pb
from octavo.wire.requests import FinishReason, RejectReason, Request


class RequestSpans:
    """Holds the spans of requests in the core: how long each waited, and what it lost. A request carries its span's
    traceparent there in place of its frontend's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Spans by traceparent, with the time of their beginning.
        self._spans: dict[str, tuple[Span, float]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def begin(self, request: Request) -> Request:
        """Returns the request as the core is to see it: if it is traced here, under a span of its own."""
        if not request.traceparent:
            return request
        span = start_span(
            "schedule",
            request.traceparent,
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_tokens=len(request.prompt_token_ids),
        )
        if not span.traceparent:
            return request
        self._spans[span.traceparent] = span, self._clock()
        return msgspec.structs.replace(request, traceparent=span.traceparent)

    def happened(self, traceparent: str, event: str) -> None:
        """Adds an event to a request's span; see `SchedulerObserver.traced`."""
        if held := self._spans.get(traceparent):
            span, began_at = held
            span.event(event)
            if event == "admitted":
                span.set(queue_time_s=self._clock() - began_at)

    def ended(self, traceparent: str, error: str) -> None:
        """Ends a request's span; see `SchedulerObserver.ended`."""
        if held := self._spans.pop(traceparent, None):
            held[0].end(error)


# -- metrics ----------------------------------------------------------------------------------------------------------


_BLOCK_STATES: Final = {
    "free": "KV blocks held by nobody, whether their content is cached or not.",
    "cached": "KV blocks whose content a request with the same beginning would share.",
    "cached_free": "The free ones of the cached blocks.",
    "parked": "KV blocks given up that a step under way may still use.",
    "pinned": "KV blocks kept for pinned prefixes.",
    "referenced": "KV blocks held by running requests alone.",
}
_CPU_BLOCK_STATES: Final = {
    "free": "Blocks in CPU memory to swap to, held by nobody.",
    "referenced": "Blocks in CPU memory of requests that are swapped out.",
}

# By field of a tier: the metric, and what it counts.
_TIER_GAUGES: Final = {
    "blocks": ("octavo_cache_blocks", "KV blocks whose content a request with the same beginning would find."),
    "capacity": ("octavo_cache_capacity_blocks", "KV blocks for which there is room."),
}
_TIER_COUNTERS: Final = {
    "hits": ("octavo_cache_hits", "Requests that found some of their beginnings there."),
    "hit_tokens": ("octavo_cache_hit_tokens", "The tokens of these."),
    "evicted_blocks": ("octavo_cache_evicted_blocks", "KV blocks whose content made way for other content."),
    "missed_blocks": ("octavo_cache_missed_blocks", "KV blocks that were asked for in vain."),
}


class SchedulerMetrics(SchedulerObserver, Collector):
    """Counts what the core does and yields it as metrics. `clock` is that of the shell, in seconds."""

    def __init__(self, clock: Callable[[], float], spans: RequestSpans) -> None:
        self._clock = clock
        self._spans = spans
        self._stepped_at = clock()
        self._load = pb.GetLoadResponse()
        self._preemptions = Tally("swap", "recompute")
        self._rejected, self._finished = Tally(*RejectReason), Tally(*FinishReason)
        self._stalled: list[str] = []
        self._lost, self._aborted = Tally(*LossCause), 0
        self._prompt_tokens = self._cached_tokens = 0
        self._computed = self._sampled = 0
        self._moved_requests = self._moved_blocks = 0
        # Blocks of prefixes that workers have copied of others, those of them that were of use, and late copies.
        self._copied = self._copied_found = self._copied_late = 0
        sources = [source.value for source in DraftSource]
        self._drafts, self._guesses, self._accepted = Tally(*sources), Tally(*sources), Tally(*sources)
        # By the place of a guess in its draft, from 0 on.
        self._accepted_places = Tally()
        self._queued, self._step_s = Histogram(WAIT_S), Histogram(SHORT_S)
        self._step_tokens, self._step_requests = Histogram(SIZES), Histogram(SIZES)

    def publish(self, load: pb.GetLoadResponse) -> None:
        """Makes `load` the books that scrapers read from now on; the message must not change any more."""
        self._load = load

    # -- events --------------------------------------------------------------------------------------------------------

    def admitted(self, waited_s: float) -> None:
        self._queued.observe(waited_s)

    def preempted(self, *, swapped: bool) -> None:
        self._preemptions.add("swap" if swapped else "recompute")

    def traced(self, traceparent: str, event: str) -> None:
        self._spans.happened(traceparent, event)

    def ended(self, traceparent: str, error: str = "") -> None:
        self._spans.ended(traceparent, error)

    def replica_lost(self, cause: str) -> None:
        self._lost.add(cause)

    def stalled(self, worker_ids: list[str]) -> None:
        self._stalled = worker_ids

    def rejected(self, reason: str) -> None:
        self._rejected.add(reason)

    def finished(self, reason: str) -> None:
        self._finished.add(reason)

    def aborted(self) -> None:
        self._aborted += 1

    def prefix_lookup(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def step(self, tokens_computed: int, tokens_sampled: int, sequences: int, seconds: float) -> None:
        self._stepped_at = self._clock()
        self._computed += tokens_computed
        self._sampled += tokens_sampled
        self._step_s.observe(seconds)
        self._step_tokens.observe(tokens_computed)
        self._step_requests.observe(sequences)

    def moved(self, num_blocks: int) -> None:
        self._moved_requests += 1
        self._moved_blocks += num_blocks

    def prefix_copied(self, num_blocks: int, num_found: int, *, is_late: bool) -> None:
        self._copied += num_blocks
        self._copied_found += num_found
        self._copied_late += is_late

    def drafted(self, source: str, guesses: int, accepted: int) -> None:
        self._drafts.add(source)
        self._guesses.add(source, guesses)
        self._accepted.add(source, accepted)
        for place in range(accepted):
            self._accepted_places.add(str(place))

    # -- figures -------------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        load = self._load
        yield from self._requests(load)
        yield from self._steps()
        yield from self._speculation()
        yield from _workers(load.workers)
        rows = [((worker.id,), float(worker.id in self._stalled)) for worker in load.workers]
        yield gauges("octavo_worker_stalled", "Whether it has work and answers no step.", ["worker"], rows)
        yield from _blocks(load.workers)
        yield from _tiers(load.workers)
        yield from self._aliases(load)

    def _requests(self, load: pb.GetLoadResponse) -> Iterator[Metric]:
        yield gauge("octavo_requests_waiting", "Requests that wait for a worker.", load.waiting)
        text = "Tokens to be computed of requests that wait: prompts, and what was generated."
        yield gauge("octavo_waiting_tokens", text, load.waiting_tokens)
        yield gauge("octavo_requests_running", "Requests that run on a worker.", load.running)
        yield gauge("octavo_requests_swapped", "Requests whose KV blocks are in CPU memory.", load.swapped)
        yield self._queued.family("octavo_queue_time_seconds", "From a request's arrival to its first admission.")
        yield self._preemptions.family("octavo_preemptions", "Requests that lost their blocks to others.", "kind")
        yield self._rejected.family("octavo_requests_rejected", "Requests refused or given up.", "reason")
        yield self._finished.family("octavo_scheduler_sequences_finished", "Sequences that ended here.", "reason")
        yield counter("octavo_requests_aborted", "Requests dropped before their end.", self._aborted)
        yield counter("octavo_prefix_lookup_tokens", "Tokens of prompts looked up in the cache.", self._prompt_tokens)
        yield counter("octavo_prefix_hit_tokens", "Those of them found computed.", self._cached_tokens)
        text = "Requests that went on on another worker, with what was computed of them."
        yield counter("octavo_moved_requests", text, self._moved_requests)
        yield counter("octavo_moved_blocks", "KV blocks that were copied for that.", self._moved_blocks)
        text = "KV blocks of prefixes that workers were to copy from others."
        yield counter("octavo_prefix_copied_blocks", text, self._copied)
        text = "Those of them that came, and could be found."
        yield counter("octavo_prefix_copied_found_blocks", text, self._copied_found)
        yield counter("octavo_prefix_late_copies", "Copies that nobody waited for any more.", self._copied_late)
        yield gauge("octavo_frontends", "Frontends with a lease.", load.frontends)
        yield gauge("octavo_pinned_prefixes", "Prefixes that stay computed.", load.pinned_prefixes)
        yield self._lost.family("octavo_workers_lost", "Workers that counted as lost.", "cause")
        yield counter("octavo_dropped_messages", "Messages that were malformed or stale.", load.dropped_messages)

    def _steps(self) -> Iterator[Metric]:
        yield counter("octavo_tokens_computed", "Tokens of steps that are done.", self._computed)
        yield counter("octavo_tokens_sampled", "Tokens that these steps chose.", self._sampled)
        yield self._step_s.family("octavo_step_seconds", "Of a step, from when its worker could begin to its answer.")
        yield self._step_tokens.family("octavo_step_tokens", "Tokens computed in a step.")
        yield self._step_requests.family("octavo_step_requests", "Requests with work in a step.")
        age = self._clock() - self._stepped_at
        yield gauge("octavo_last_step_age_seconds", "Since the last step was answered, or since the start.", age)

    def _speculation(self) -> Iterator[Metric]:
        yield self._drafts.family("octavo_drafts", "Drafts of next tokens that steps have checked.", "source")
        yield self._guesses.family("octavo_draft_tokens", "Guesses in these drafts.", "source")
        yield self._accepted.family("octavo_accepted_draft_tokens", "Those of them that became tokens.", "source")

    def _aliases(self, load: pb.GetLoadResponse) -> Iterator[Metric]:
        """Yields figures that boards and autoscalers know under vLLM's names, of all workers together. Frontends tell
        the same, but for the preemptions."""
        labels = {"model_name": load.workers[0].model if load.workers else ""}
        total = sum(worker.blocks_total for worker in load.workers)
        used = total - sum(worker.blocks_free for worker in load.workers)
        # Where there is no block, none is free.
        usage = used / total if total else 1.0
        waiting = load.waiting + load.swapped
        yield gauge("vllm:num_requests_waiting", "Requests that wait or are swapped out.", waiting, labels)
        yield gauge("vllm:num_requests_running", "Requests that run on a worker.", load.running, labels)
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage, labels)
        yield counter("vllm:num_preemptions", "Requests that lost their blocks.", self._preemptions.total, labels)
        text = "Drafts of next tokens that steps have checked."
        yield counter("vllm:spec_decode_num_drafts", text, self._drafts.total, labels)
        yield counter("vllm:spec_decode_num_draft_tokens", "Guesses in these drafts.", self._guesses.total, labels)
        text = "Those of them that became tokens."
        yield counter("vllm:spec_decode_num_accepted_tokens", text, self._accepted.total, labels)
        text = "The same by the guess's place in its draft."
        rows = [((*labels.values(), place), count) for place, count in self._accepted_places.counts.items()]
        yield counters("vllm:spec_decode_num_accepted_tokens_per_pos", text, [*labels, "position"], rows)
        yield _cache_config(load.workers)


def _workers(workers: Sequence[pb.Worker]) -> Iterator[Metric]:
    described = [((worker.id, worker.device, worker.model, _state_name(worker)), 1.0) for worker in workers]
    labels = ["worker", "device", "model", "state"]
    yield gauges("octavo_workers", "1 for each worker that is registered.", labels, described)
    running = [((worker.id,), float(worker.running)) for worker in workers]
    yield gauges("octavo_worker_requests_running", "Requests that run there.", ["worker"], running)
    steps = [((worker.id,), float(worker.steps_in_flight)) for worker in workers]
    yield gauges("octavo_worker_steps_in_flight", "Plans whose results are not back.", ["worker"], steps)
    rates = [((worker.id,), worker.token_rate) for worker in workers]
    yield gauges("octavo_worker_token_rate", "Tokens computed per second of work.", ["worker"], rates)
    drafted = [((worker.id,), float(sum(worker.drafted_tokens))) for worker in workers]
    yield counters("octavo_worker_draft_tokens", "Guesses of drafts checked there.", ["worker"], drafted)
    accepted = [((worker.id,), float(sum(worker.accepted_tokens))) for worker in workers]
    yield counters("octavo_worker_accepted_draft_tokens", "Those of them that were right.", ["worker"], accepted)


def _state_name(worker: pb.Worker) -> str:
    return pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()


def _blocks(workers: Sequence[pb.Worker]) -> Iterator[Metric]:
    """Yields blocks by state. Free, parked, pinned and referenced blocks are all that there are; cached ones are
    counted among these too."""
    totals = [((worker.id,), float(worker.blocks_total)) for worker in workers]
    yield gauges("octavo_blocks", "KV blocks.", ["worker"], totals)
    totals = [((worker.id,), float(worker.cpu_blocks_total)) for worker in workers]
    yield gauges("octavo_cpu_blocks", "Blocks in CPU memory to swap to.", ["worker"], totals)
    for state in _BLOCK_STATES:
        rows = [((worker.id,), float(getattr(worker, f"blocks_{state}"))) for worker in workers]
        yield gauges(f"octavo_blocks_{state}", _BLOCK_STATES[state], ["worker"], rows)
    for state in _CPU_BLOCK_STATES:
        rows = [((worker.id,), float(getattr(worker, f"cpu_blocks_{state}"))) for worker in workers]
        yield gauges(f"octavo_cpu_blocks_{state}", _CPU_BLOCK_STATES[state], ["worker"], rows)


def _tiers(workers: Sequence[pb.Worker]) -> Iterator[Metric]:
    """Yields the tiers of each worker's prefix cache."""
    tiers = [(worker.id, tier_name(tier.tier), tier) for worker in workers for tier in worker.tiers]
    for family, described in ((gauges, _TIER_GAUGES), (counters, _TIER_COUNTERS)):
        for field, (metric, text) in described.items():
            rows = [((worker, name), float(getattr(tier, field))) for worker, name, tier in tiers]
            yield family(metric, text, ["worker", "tier"], rows)
    moves = [
        ((worker, name, tier_name(move.to)), float(move.blocks)) for worker, name, tier in tiers for move in tier.moves
    ]
    yield counters("octavo_cache_moved_blocks", "KV blocks moved between tiers.", ["worker", "tier", "to"], moves)


def tier_name(tier: pb.Tier) -> str:
    """Returns the name by which operators know a tier."""
    return pb.Tier.Name(tier).removeprefix("TIER_").lower()


def _cache_config(workers: Sequence[pb.Worker]) -> Metric:
    num_blocks: Counter[int] = Counter()
    for worker in workers:
        num_blocks[worker.block_size] += worker.blocks_total
    labels = ["block_size", "num_gpu_blocks"]
    rows = [((str(size), str(count)), 1.0) for size, count in num_blocks.items()]
    return gauges("vllm:cache_config_info", "Always 1; the blocks of each size, of all workers.", labels, rows)

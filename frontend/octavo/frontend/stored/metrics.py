"""Collects the metrics of stored responses."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.frontend.stored.service import StoredResponses
from octavo.runtime.telemetry.numbers import counters, gauge


class StoredMetrics(Collector):
    """Exposes what is stored, as the last sweep has found it, and what this frontend computes and has removed."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    def collect(self) -> Iterator[Metric]:
        stored, removals = self._stored, self._stored.store.store.removals
        yield gauge(
            "octavo_stored_records", "Responses and conversations that all frontends store.", stored.num_records
        )
        yield gauge("octavo_stored_bytes", "What they take, of --response-store-memory.", stored.num_bytes)
        yield gauge("octavo_background_responses", "Responses computed here that nobody waits for.", stored.num_running)
        rows = [(["expired"], removals.expired), (["evicted"], removals.evicted)]
        yield counters("octavo_stored_removals", "Records removed by this frontend, by why.", ["reason"], rows)

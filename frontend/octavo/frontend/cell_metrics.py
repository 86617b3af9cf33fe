"""What the frontend knows of each cell behind it, as metrics."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.frontend.cells import Cells
from octavo.frontend.scheduler_client import Availability
from octavo.telemetry.numbers import counter, gauges


class CellMetrics(Collector):
    """Told in the event loop alone. A cell goes by its scheduler's endpoint."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def collect(self) -> Iterator[Metric]:
        links = self._cells.links
        ready = [([link.endpoint], link.availability is Availability.READY) for link in links]
        requests = [([link.endpoint], len(link.live)) for link in links]
        work = [([link.endpoint], link.work_tokens) for link in links]
        yield gauges("octavo_cell_ready", "Whether a cell has workers of our model that answer.", ["cell"], ready)
        yield gauges("octavo_cell_requests", "This frontend's requests in a cell.", ["cell"], requests)
        yield gauges("octavo_cell_work_tokens", "Tokens a cell is reckoned to compute yet.", ["cell"], work)
        yield counter("octavo_cell_handovers", "Requests that another cell was to go on with.", self._cells.handovers)

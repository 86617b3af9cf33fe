"""Puts together what serves files and batches, from a frontend's settings."""

from collections.abc import Callable

from starlette.types import ASGIApp

from octavo.frontend.batch.files import FileBounds, Files
from octavo.frontend.batch.records import Records
from octavo.frontend.batch.runner import BatchRunner
from octavo.frontend.batch.storage import Storage
from octavo.frontend.config import FrontendConfig
from octavo.frontend.http.envelope import unix_time


class BatchService:
    """Holds the files and batches of a frontend that was given a directory for them."""

    def __init__(self, config: FrontendConfig, clock: Callable[[], int] = unix_time) -> None:
        """Raises `StorageError` for a directory that cannot be used."""
        assert config.batch_directory is not None
        storage = Storage(config.batch_directory)
        bounds = FileBounds(config.max_file_bytes, config.tenant_max_file_bytes, config.file_expiry_s)
        self.clock = clock
        self.files = Files(storage, bounds, clock)
        self.records = Records(storage, self.files, clock)
        self.runner = BatchRunner(self.records, self.files, config.max_batch_requests, clock)

    async def run(self, app: ASGIApp) -> None:
        """Has `app` answer the calls of batches until it is cancelled."""
        await self.runner.run(app)

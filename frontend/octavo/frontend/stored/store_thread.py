"""Calls the store of responses off the event loop, one call after another, and says what its failures mean."""

import asyncio
import sqlite3
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, Final, ParamSpec, TypeVar

from octavo.frontend.api.body import UNREADABLE
from octavo.frontend.errors import Reason, Unavailable
from octavo.frontend.stored.store import Store
from octavo.runtime.telemetry import optional

P = ParamSpec("P")
T = TypeVar("T")

# What a disk, other processes or a damaged file bring about.
_FAILURES: Final = (sqlite3.Error, OSError, zlib.error, *UNREADABLE)


class StoreThread:
    """Gives a store a thread of its own. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._executor = ThreadPoolExecutor(1, "response-store")

    async def call(self, work: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `work` does with the store. Raises the `ServiceError` that it raises, and `Unavailable` where
        the store cannot be read or written; that is counted, and logged once."""

        def calling() -> tuple[T, bool]:
            before = self.store.num_changes
            return work(self.store, *args, **kwargs), self.store.num_changes > before

        try:
            found, has_changed = await asyncio.get_running_loop().run_in_executor(self._executor, calling)
        except _FAILURES as error:
            optional.failed(optional.RESPONSE_STORE, error, "answers are given all the same, and not kept")
            raise Unavailable(
                Reason.STORAGE_FAILED,
                "what is stored cannot be read or written now, and the server's log says why; try again, or send what"
                " was said before with `store: false`",
            ) from error
        # What can be read may not be writable.
        if has_changed:
            optional.worked(optional.RESPONSE_STORE)
        return found

    def close(self) -> None:
        """Closes the store, once the calls before are done."""
        self._executor.submit(self.store.close)
        self._executor.shutdown()

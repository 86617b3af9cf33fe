"""What one scheduler and its workers are still about to compute, as far as a frontend can know."""

from collections.abc import Iterable

from octavo.frontend.journal import Journal


class CellWork:
    """Tokens: what the scheduler told last, moved by what this frontend has sent and ended since."""

    def __init__(self) -> None:
        # This frontend's share, by what the scheduler calls the requests.
        self._own: dict[str, int] = {}
        self._num_own = 0
        self._num_others = 0

    @property
    def tokens(self) -> int:
        """Of all frontends."""
        return self._num_own + self._num_others

    def add(self, journal: Journal) -> None:
        """The request was sent there."""
        self._own[journal.wire_id] = tokens = journal.work_tokens
        self._num_own += tokens

    def drop(self, journal: Journal) -> None:
        """It is there no more."""
        self._num_own -= self._own.pop(journal.wire_id, 0)

    def told(self, work_tokens: int, own: Iterable[Journal]) -> None:
        """The scheduler has just counted, and holds these of this frontend."""
        self._own = {journal.wire_id: journal.work_tokens for journal in own}
        self._num_own = sum(self._own.values())
        self._num_others = max(0, work_tokens - self._num_own)

"""Checks a core's notices: they are true of the core, in an order that makes sense, and complete."""

from octavo.scheduler.core.events import Effect, SendToFrontend
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import RequestGroup, SequenceStatus
from octavo.wire.requests import Notice, NoticeKind, Notices


class NoticeBook:
    """Follows what each held request was told; to be shown the effects of every event and every plan."""

    def __init__(self) -> None:
        self._last: dict[RequestGroup, NoticeKind] = {}

    def check(self, core: Scheduler, effects: list[Effect]) -> None:
        """Asserts what these effects say, and that they leave nothing out."""
        held = {(group.frontend_id, group.request_id): group for group in core.groups}
        self._last = {group: kind for group, kind in self._last.items() if group in held.values()}
        told = [(e.frontend_id, e.message) for e in effects if isinstance(e, SendToFrontend)]
        batches = [(frontend_id, message) for frontend_id, message in told if isinstance(message, Notices)]
        assert len({frontend_id for frontend_id, _ in batches}) == len(batches), "two messages where one would do"
        for frontend_id, message in batches:
            for notice in message.notices:
                self._take(core, held[frontend_id, notice.request_id], notice)
        self._check_complete(core)

    def _take(self, core: Scheduler, group: RequestGroup, notice: Notice) -> None:
        last = self._last.get(group)
        assert notice.attempt == group.request.attempt, "a notice of another attempt"
        assert notice.queue_position == _position(core, group), f"{notice} of {group.status}"
        if notice.kind is NoticeKind.RESUMED:
            assert last not in (None, NoticeKind.RESUMED), "it runs on, and was never told to wait"
        if notice.kind is NoticeKind.QUEUED:
            assert last is not NoticeKind.RESUMED, "it waits, and was not told why"
        self._last[group] = notice.kind

    def _check_complete(self, core: Scheduler) -> None:
        """Checks that running requests have no notice but of their resuming, and that stopped ones have the notice of
        that."""
        for replica in core.replicas.values():
            for group in replica.requests:
                stands = [NoticeKind.PREEMPTED] if group in replica.swapped else [None, NoticeKind.RESUMED]
                assert self._last.get(group) in stands, f"it is {group.status}, and is not told"
        for group in core.waiting:
            if group.cached_prompt_tokens is not None:
                assert self._last[group] is not NoticeKind.RESUMED, "it has stopped, and is not told"


def _position(core: Scheduler, group: RequestGroup) -> int:
    if group.status is SequenceStatus.RUNNING:
        return 0
    queues = [list(core.waiting), *(replica.swapped for replica in core.replicas.values())]
    return next(queue.index(group) + 1 for queue in queues if group in queue)

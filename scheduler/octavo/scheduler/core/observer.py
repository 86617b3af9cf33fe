"""Who is told what the core does. Does nothing by itself; metrics do. The core never asks it anything."""


class SchedulerObserver:
    """Called inside the core's turns; must be quick and must not raise. Times are in seconds of the core's clock."""

    def admitted(self, waited_s: float) -> None:
        """A request runs for the first time, so long after it first came to its frontend."""

    def preempted(self, *, swapped: bool) -> None:
        """A request lost its blocks to others: kept in CPU memory, or to be computed again."""

    def replica_lost(self, cause: str) -> None:
        """A worker counts as lost; the value of a `LossCause`."""

    def stalled(self, worker_ids: list[str]) -> None:
        """These workers stand still, and no others: they have work and answer no step."""

    def rejected(self, reason: str) -> None:
        """A request was refused, or given up later; the value of a `RejectReason`."""

    def finished(self, reason: str) -> None:
        """One sequence of a request has ended, or its frontend has found its end; the value of a `FinishReason`."""

    def aborted(self) -> None:
        """A request was dropped before its end: its frontend no longer wants it, or is lost."""

    def traced(self, traceparent: str, event: str) -> None:
        """What has become of the request that is traced by this name: admitted, or the name of a `NoticeKind`."""

    def ended(self, traceparent: str, error: str = "") -> None:
        """Nothing is held any more of the request that is traced by this name; `error` is why, if it was rejected."""

    def prefix_lookup(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time here; so much of its prompt was found computed."""

    def step(self, tokens_computed: int, tokens_sampled: int, sequences: int, seconds: float) -> None:
        """A worker has answered a step that is done, so long after it could begin with it."""

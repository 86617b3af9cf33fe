"""A frontend's part around a cluster: it keeps what is wanted, submits it again wherever it may be lost, and knows what
must have come in the end."""

import msgspec

from octavo.scheduler.core.events import FrontendJoined, LeaseRenewed, SequenceEnded
from octavo.testing.cluster import FRONTEND, Cluster, Stream
from octavo.wire.requests import GeneratedSequence, Lease, Rejected, Renewed, Request

from .expectations import Expectations


class Journal:
    """`requests` are those that are still wanted, by id; `ended` the sequences of which the frontend has found the end,
    with the number of tokens they had then."""

    def __init__(self, cluster: Cluster, expectations: Expectations) -> None:
        self.requests: dict[str, Request] = {}
        self.ended: dict[Stream, int] = {}
        self._cluster = cluster
        self._expectations = expectations
        self._attempts = 1

    def submit(self, request: Request) -> Rejected | None:
        """Why the scheduler will not have it, if so."""
        self._cluster.submit(request)
        rejection = self._cluster.rejected.pop(request.request_id, None)
        if rejection is None:
            self.requests[request.request_id] = request
        return rejection

    def abort(self, request_id: str) -> None:
        del self.requests[request_id]
        self._cluster.abort(request_id)

    def end(self, request_id: str, index: int, *, stale: bool) -> None:
        """A stop string is found in a sequence. Nothing comes of it where `stale`, of an attempt that is over, nor of
        beams, of which nothing has been heard."""
        request, stream = self.requests[request_id], (request_id, index)
        self._cluster.handle(SequenceEnded(FRONTEND, request_id, request.attempt - stale, index))
        if not stale and request.sampling.beam is None:
            self.ended.setdefault(stream, len(self._cluster.streams.get(stream, [])))

    def join(self) -> None:
        self._cluster.handle(FrontendJoined(FRONTEND))

    def renew(self) -> None:
        """Renews the lease of all that is wanted, and submits again what the scheduler does not hold."""
        live = [request for request in self.requests.values() if not self._is_finished(request)]
        self._cluster.handle(LeaseRenewed(FRONTEND, [Lease(r.request_id, r.attempt) for r in live]))
        answer = self._cluster.to_frontend[-1]
        assert isinstance(answer, Renewed)
        for lease in answer.unknown:
            self.submit_again(lease.request_id)

    def submit_again(self, request_id: str) -> None:
        """After what was generated of it; a beam search, of which nothing was heard, from the beginning."""
        request = self.requests[request_id]
        self._attempts += 1
        known = [
            GeneratedSequence(list(self._cluster.streams.get(stream, [])), self._is_ended(stream))
            for stream in _streams(request)
            if request.sampling.beam is None
        ]
        heard = any(sequence.token_ids or sequence.finished for sequence in known)
        again = msgspec.structs.replace(
            request, attempt=self._attempts, resubmitted=True, generated=known if heard else []
        )
        assert self.submit(again) is None, "what was accepted before is refused"

    def assert_all_came(self) -> None:
        """Every sequence of all that is wanted, with its logprobs, as if nothing had happened."""
        for request in self.requests.values():
            assert self._is_finished(request)
            for stream, tokens in zip(_streams(request), self._expectations.outputs(request), strict=True):
                self._assert_came(request, stream, tokens[: self.ended.get(stream, len(tokens))])

    def _assert_came(self, request: Request, stream: Stream, tokens: list[int]) -> None:
        deltas = self._cluster.deltas[stream]
        assert self._cluster.streams.get(stream, []) == tokens
        assert [entry for d in deltas for entry in d.logprobs] == self._expectations.logprobs(request, tokens)
        if stream[1] == 0 and tokens:
            prompt = [entry for delta in deltas for entry in delta.prompt_logprobs]
            assert prompt == self._expectations.prompt_logprobs(request)

    def _is_finished(self, request: Request) -> bool:
        return all(map(self._is_ended, _streams(request)))

    def _is_ended(self, stream: Stream) -> bool:
        return stream in self._cluster.ended or stream in self.ended


def _streams(request: Request) -> list[Stream]:
    return [(request.request_id, index) for index in range(request.sampling.num_sequences)]

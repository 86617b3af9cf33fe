"""Acts as the clients of a cell: asks for what jobs say, and records when tokens come."""

from dataclasses import dataclass, field

from octavo.wire.requests import CacheKey, Deltas, Rejected, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.workload.job import Job
from octavo.workload.measures import Gaps, Served

_NO_CACHE_KEY = CacheKey()


@dataclass(slots=True)
class _Stream:
    """Holds an open request, and when each of its sequences had its last token."""

    served: Served
    num_open: int
    last_at: dict[int, float] = field(default_factory=dict)


class Clients:
    """Records what becomes of every request, with the number of its job."""

    def __init__(self) -> None:
        self.served: list[tuple[int, Served]] = []
        self.gaps = Gaps()
        self._open: dict[str, _Stream] = {}

    def expect(self, index: int, job: Job) -> None:
        """Expects the answers to the job's request, which comes now."""
        served = Served(job, None, None, 0)
        self.served.append((index, served))
        self._open[_request_id(index)] = _Stream(served, job.n)

    def take(self, message: Deltas | Rejected, now: float) -> None:
        """Takes a message for clients at the virtual time `now`."""
        if isinstance(message, Rejected):
            self._open.pop(message.request_id).served.error = f"{message.reason.value}: {message.detail}"
            return
        add_gap = self.gaps.add
        for delta in message.deltas:
            stream = self._open[delta.request_id]
            served, last_at, index = stream.served, stream.last_at, delta.sequence_index
            served.num_tokens += len(delta.token_ids)
            if served.first_token_s is None:
                served.first_token_s = now
            if index in last_at:
                add_gap(now - last_at[index])
            last_at[index] = now
            if delta.finish_reason is not None:
                stream.num_open -= 1
                if not stream.num_open:
                    served.finished_s = now
                    served.preemptions = delta.preemptions
                    del self._open[delta.request_id]


def ask(index: int, job: Job, prompt_token_ids: list[int], model_fingerprint: str) -> Request:
    """Makes the request of job number `index`."""
    return Request(
        request_id=_request_id(index),
        attempt=1,
        resubmitted=False,
        model_fingerprint=model_fingerprint,
        prompt_token_ids=prompt_token_ids,
        generated=[],
        sampling=_sampling(job, index),
        priority=job.priority,
        tenant=job.tenant,
        cache_key=_NO_CACHE_KEY,
        age_ms=0,
    )


def _request_id(index: int) -> str:
    return str(index)


def _sampling(job: Job, seed: int) -> SamplingParams:
    if job.beam_width:
        beam = BeamSearch(job.beam_width, length_penalty=1.0, early_stopping=EarlyStopping.OFF)
        return SamplingParams(max_tokens=job.output_tokens, num_sequences=job.n, beam=beam)
    return SamplingParams(max_tokens=job.output_tokens, temperature=1.0, num_sequences=job.n, seed=seed)

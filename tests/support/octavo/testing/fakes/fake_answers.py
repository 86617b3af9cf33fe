"""Makes up the fake scheduler's answers: tokens, their logprobs, and the deltas that carry both."""

from collections.abc import Sequence

from octavo.wire import history
from octavo.wire.requests import Delta, FinishReason, Request
from octavo.wire.sampling import Logprobs, SamplingParams


def letters(request: Request, index: int) -> list[int]:
    """Returns the default answer of the byte model: ids of printable characters, a function of the prompt, the seed and
    the sequence's index."""
    state = history.extend((request.sampling.seed & 0xFFFF) + index, request.prompt_token_ids)
    tokens = []
    for _ in range(request.sampling.max_tokens):
        state = history.extend(state, (7,))
        tokens.append(32 + (state >> 20) % 50)
    return tokens


def made_up(token_id: int, top: int) -> Logprobs:
    """The logprobs of a token, a function of its id in eighths, so that their sums are exact."""
    return Logprobs(-(token_id % 9 + 1) / 8, token_id % 3 + 1, [*range(top)], [-(i + 1) / 8 for i in range(top)])


def total(token_ids: Sequence[int]) -> float:
    """Sums the tokens' made-up logprobs."""
    return sum(made_up(token_id, 0).logprob for token_id in token_ids)


def delta_of(request: Request, index: int, answer: list[int], start: int, end: int) -> Delta:
    """The tokens of `answer` from `start` to `end`, as a sequence of the request brings them."""
    sampling, new = request.sampling, answer[start:end]
    reason = None
    if new[-1] in sampling.stop_token_ids:
        reason = FinishReason.STOP
    elif start + len(new) == sampling.max_tokens:
        reason = FinishReason.LENGTH
    return Delta(
        request_id=request.request_id,
        attempt=request.attempt,
        sequence_index=index,
        start_index=start,
        previous_hash=history.extend(history.EMPTY, answer[:start]),
        token_ids=new,
        finish_reason=reason,
        preemptions=0,
        swaps=0,
        cached_prompt_tokens=0,
        logprobs=[] if sampling.logprobs is None else [made_up(i, sampling.logprobs) for i in new],
        prompt_logprobs=_of_prompt(request.prompt_token_ids, sampling) if (index, start) == (0, 0) else [],
    )


def _of_prompt(token_ids: list[int], sampling: SamplingParams) -> list[Logprobs]:
    top = sampling.prompt_logprobs
    return [] if top is None else [made_up(token_id, top) for token_id in token_ids[1:]]

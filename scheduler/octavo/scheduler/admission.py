"""Which requests can never run here, and why. Frontends check most of this first, in better words."""

from octavo.wire.requests import RejectReason, Request
from octavo.wire.steps import ModelInfo

Refusal = tuple[RejectReason, str]


def refuse_malformed(request: Request) -> Refusal | None:
    """What is wrong with a request whatever serves it."""
    if not request.prompt_token_ids:
        return RejectReason.EMPTY_PROMPT, "the prompt has no tokens"
    if len(request.generated_token_ids) >= request.sampling.max_tokens:
        return RejectReason.ALREADY_COMPLETE, "nothing is left to generate"
    return None


def refuse_misfit(request: Request, model: ModelInfo, capacity_tokens: int) -> Refusal | None:
    """Why `model` on replicas of which the largest holds `capacity_tokens` cannot run the request.

    No replica (0) refuses nothing. A request that was accepted before waits for a replica that is large enough: the one
    it ran on may come back.
    """
    longest = len(request.prompt_token_ids) + request.sampling.max_tokens
    if request.model_fingerprint != model.fingerprint:
        return RejectReason.MODEL_MISMATCH, f"the workers serve {model.name}, fingerprint {model.fingerprint[:12]}"
    if longest > model.max_model_len:
        return RejectReason.PROMPT_TOO_LONG, f"{longest} tokens exceed the context of {model.max_model_len}"
    if max(request.prompt_token_ids) >= model.vocab_size:
        return RejectReason.BAD_TOKEN_ID, f"a token id is outside the vocabulary of {model.vocab_size}"
    if not request.resubmitted and 0 < capacity_tokens < longest:
        return RejectReason.NEVER_FITS_KV, f"{longest} tokens exceed the KV cache of {capacity_tokens}"
    return None

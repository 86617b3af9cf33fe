"""How the next token is chosen and when a sequence ends, as the scheduler and the workers need to know it."""

from typing import Annotated

from msgspec import Meta

from octavo.wire.base import MAX_TOKENS, Identity, TokenId, Value

MAX_STOP_TOKEN_IDS = 128


class SamplingParams(Value, frozen=True):
    """One request's choice of tokens. All defaults are resolved before it is made; nothing here is optional.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` is always the one in force: the client's
    or one the frontend drew. `stop_token_ids` holds every id that ends the sequence, EOS ids included.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)]
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)]
    seed: Identity
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]

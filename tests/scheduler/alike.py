"""Two prompts of which one begins as the other does, too long for a step: the second builds on what is still to come of
the first."""

import msgspec

from octavo.testing.cluster import VOCABULARY, make_request
from octavo.wire.requests import Request


def alike(names: tuple[str, str], length: int, longer: int, start: int) -> tuple[Request, Request]:
    """One of `length` tokens that nobody else has, counted from `start`, and one that goes on for some more."""
    tokens = [(start * 31 + index) % VOCABULARY.size for index in range(length + longer)]
    first, second = make_request(names[0], length, 3), make_request(names[1], length + longer, 4)
    return (
        msgspec.structs.replace(first, prompt_token_ids=tokens[:length]),
        msgspec.structs.replace(second, prompt_token_ids=tokens),
    )

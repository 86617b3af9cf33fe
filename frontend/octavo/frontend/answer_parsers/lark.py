"""Writes parts of grammars in Lark's notation, as llguidance reads it: texts in which markers may be tokens."""

import json
import re
from collections.abc import Callable, Iterable

# Returns the id of a token that was added to a vocabulary, None for a text that is none.
TokenIds = Callable[[str], int | None]


def quoted(text: str) -> str:
    """Returns a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, markers: Iterable[str], token_id: TokenIds) -> str:
    """Returns what matches exactly `text`. Those of `markers` that are tokens match as such: no string matches them."""
    ids = {marker: found for marker in markers if (found := token_id(marker)) is not None}
    if not ids:
        return quoted(text)
    longest_first = sorted(ids, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return " ".join(f"<[{ids[piece]}]>" if piece in ids else quoted(piece) for piece in pieces if piece) or '""'


def any_token_but(token_ids: Iterable[int]) -> str:
    """Returns what matches one token, whichever but these."""
    return f"<[^{','.join(map(str, sorted(set(token_ids))))}]>"


def at_most(count: int | None) -> str:
    """Returns how often something may be repeated, None for no limit."""
    return "*" if count is None else f"{{0,{count}}}"

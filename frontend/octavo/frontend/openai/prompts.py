"""The field `prompt` of a completion: a text, token ids, or a list of either."""

from typing import Final

import msgspec
from msgspec import Raw

from octavo.frontend.errors import InvalidRequest, bad_parameter
from octavo.frontend.openai.fields import UNREADABLE, given
from octavo.frontend.validation import check_room

MAX_PROMPTS: Final = 256

_decode_text = msgspec.json.Decoder(str).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_lists = msgspec.json.Decoder(list[list[int]]).decode


def read_prompts(raw: Raw, max_model_len: int) -> list[str | list[int]]:
    """All prompts, in order. Raises `InvalidRequest` for anything else, for more than `MAX_PROMPTS`, and for token ids
    that leave no room for an answer."""
    text = given(raw)
    try:
        prompts = _read(text, max_model_len)
    except UNREADABLE as error:
        raise _wrong_form() from error
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise bad_parameter("prompt", f"a list of {len(prompts)}", f"it may hold 1 to {MAX_PROMPTS} prompts")
    return prompts


def _read(text: bytes, max_model_len: int) -> list[str | list[int]]:
    match text[:1], text[1:].lstrip()[:1]:
        case b'"', _:
            return [_decode_text(text)]
        case b"[", b'"':
            return list(_decode_texts(text))
        case b"[", b"[":
            # Before lists are made of them.
            if (lists := text.count(b"[") - 1) > MAX_PROMPTS:
                raise bad_parameter("prompt", f"a list of {lists}", f"it may hold 1 to {MAX_PROMPTS} prompts")
            return list(_decode_lists(text))
        case b"[", b"]":
            return []
        case b"[", _:
            # As above.
            check_room(text.count(b",") + 1, max_model_len)
            return [_decode_ids(text)]
    raise _wrong_form()


def _wrong_form() -> InvalidRequest:
    return bad_parameter(
        "prompt", "of another form", "it must be a text, token ids, or a list of texts or of token ids"
    )

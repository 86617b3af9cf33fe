"""Computes the rolling hash of a sequence's generated tokens, which two processes compare before they splice a
stream."""

from collections.abc import Iterable
from typing import Final

EMPTY: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


def extend(value: int, token_ids: Iterable[int]) -> int:
    """Returns the hash after `token_ids`, given the hash `value` before them (`EMPTY` at the start).

    The hash is FNV-1a over whole token ids (Fowler, Noll and Vo). It guards against mixing up honest streams, not
    against forgery.
    """
    for token_id in token_ids:
        # As `append` has it, without a call for each token.
        value = ((value ^ token_id) * _PRIME) & _MASK
    return value


def append(value: int, token_id: int) -> int:
    """Returns the hash after one more token."""
    return ((value ^ token_id) * _PRIME) & _MASK

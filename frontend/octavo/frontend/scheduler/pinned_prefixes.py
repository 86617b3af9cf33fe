"""Tracks the prefixes that requests may name: read from the operator's file, and learned from the scheduler.

A scheduler keeps nothing over its restart, and has no tokenizer, so the frontends bring the prefixes back.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.wire.requests import MAX_PREFIXES, Prefix

_MAX_NAME_LENGTH = 256


class PinnedPrefixesError(ValueError):
    """The file of pinned prefixes cannot be used. The message says what to do."""


@dataclass(frozen=True)
class NamedPrefixes:
    """Holds token ids by the name of their prefix.

    `reported` is True once every scheduler at hand has said which prefixes it has pinned.
    """

    known: Mapping[str, list[int]]
    reported: bool


class PinnedPrefixes:
    """Tracks the prefixes that one scheduler has pinned, and those that were asked for and not confirmed."""

    def __init__(self, own: Mapping[str, list[int]]) -> None:
        self._own = dict(own)
        self._epoch: int | None = None
        self._pinned: dict[str, list[int]] = {}
        self._unconfirmed = dict(own)
        # The scheduler has said what is pinned, since the last welcome and since it was last asked.
        self.reported = False

    @property
    def known(self) -> dict[str, list[int]]:
        """Returns token ids by name. A prefix pinned in an earlier epoch counts until the present epoch refuses it."""
        return self._unconfirmed | self._pinned

    def has(self, token_ids: Sequence[int]) -> bool:
        """Tells whether the scheduler has pinned exactly these tokens, under whatever name."""
        return any(len(pinned) == len(token_ids) and pinned == list(token_ids) for pinned in self._pinned.values())

    def welcomed(self, epoch: int) -> list[Prefix]:
        """Returns the prefixes to pin after a welcome: all known ones in a new epoch, else those not confirmed."""
        if epoch != self._epoch:
            self._epoch, self._unconfirmed, self._pinned = epoch, self._own | self.known, {}
        self.reported = False
        return [Prefix(name, token_ids) for name, token_ids in self._unconfirmed.items()]

    def changed(self, pinned: Iterable[Prefix], *, latest: bool = True) -> None:
        """Takes the scheduler's list of all prefixes that are pinned now; `latest` if it answers all that was asked."""
        self.reported = self.reported or latest
        self._pinned = {prefix.name: prefix.token_ids for prefix in pinned}
        for name in self._pinned:
            self._unconfirmed.pop(name, None)

    def refused(self, name: str) -> None:
        """Drops a prefix that the scheduler will not pin."""
        self._unconfirmed.pop(name, None)


def read_pinned_prefixes(path: Path, encode: Callable[[str], list[int]], max_model_len: int) -> dict[str, list[int]]:
    """Reads a JSON object of names and texts; returns token ids by name.

    Raises `PinnedPrefixesError` for a file of another form, and for a prefix that leaves no room for a prompt and an
    answer within `max_model_len` tokens.
    """
    texts = _read(path)
    if len(texts) > MAX_PREFIXES:
        raise PinnedPrefixesError(f"{path} names {len(texts)} prefixes; at most {MAX_PREFIXES} can be pinned")
    prefixes = {}
    for name, text in texts:
        if name in prefixes:
            raise PinnedPrefixesError(f"{path} names the prefix {name!r} twice; give each its own name")
        prefixes[name] = _encode(path, name, text, encode, max_model_len)
    return prefixes


def _read(path: Path) -> list[tuple[str, object]]:
    try:
        # Pairs, so that a repeated name is noticed.
        content = json.loads(path.read_bytes(), object_pairs_hook=_Pairs)
    except (OSError, ValueError, RecursionError) as error:
        raise PinnedPrefixesError(f"cannot read the pinned prefixes in {path}: {error}") from error
    if not isinstance(content, _Pairs):
        raise PinnedPrefixesError(f'{path} holds no JSON object; write {{"name": "text", ...}}')
    return content


class _Pairs(list[tuple[str, object]]):
    """A JSON object as it was written: pairs in order, repeated names included."""


def _encode(path: Path, name: str, text: object, encode: Callable[[str], list[int]], max_model_len: int) -> list[int]:
    if not 1 <= len(name) <= _MAX_NAME_LENGTH:
        raise PinnedPrefixesError(
            f"{path} has a prefix whose name is {len(name)} characters long; use 1 to {_MAX_NAME_LENGTH}"
        )
    if not isinstance(text, str) or not (token_ids := encode(text)):
        raise PinnedPrefixesError(f"{path} has no text for the prefix {name!r}; write some in quotes")
    if len(token_ids) > max_model_len - 2:
        raise PinnedPrefixesError(
            f"the prefix {name!r} in {path} has {len(token_ids)} tokens and the context {max_model_len}, which leaves"
            " no room for a prompt and an answer; shorten it"
        )
    return token_ids

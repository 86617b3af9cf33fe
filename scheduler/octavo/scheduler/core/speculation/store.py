"""Recent outputs, which others of the same tenant and salt may repeat. Nothing is found across tenants or salts: how
fast an answer comes would tell one of them what another was told."""

from array import array
from collections import OrderedDict
from typing import NamedTuple

from octavo.scheduler.core.speculation.text import Text

# A half of an owner's store is full with so many tokens, or with the output that brings it there; no more are kept of
# one output.
HALF_TOKENS = 8192
# Owners beyond so many give way, those first whose last output is oldest.
MOST_OWNERS = 64


class Owner(NamedTuple):
    """Names who may be told what a request was told."""

    tenant: str
    adapter: str
    salt: str


class OutputStore:
    """Keeps the outputs that ended last, in two halves for each owner, of which the older one gives way: 32,767 tokens
    of each and of 64 owners at most, which take 32 MiB."""

    def __init__(self) -> None:
        # Halves of each owner's outputs, the later first.
        self._halves: OrderedDict[Owner, list[Text]] = OrderedDict()

    def texts(self, owner: Owner) -> list[Text]:
        """Returns the texts of the owner's outputs, the latest first."""
        return self._halves.get(owner, [])

    def forget(self, salt: str | None) -> None:
        """Forgets the outputs behind a salt, whoever owns them; None for all."""
        for owner in [owner for owner in self._halves if salt in (None, owner.salt)]:
            del self._halves[owner]

    def add(self, owner: Owner, token_ids: list[int]) -> None:
        """Adds the end of an output, as much of it as fits half of the store."""
        halves = self._halves.setdefault(owner, [])
        self._halves.move_to_end(owner)
        if len(self._halves) > MOST_OWNERS:
            self._halves.popitem(last=False)
        if not halves or len(halves[0].tokens) >= HALF_TOKENS:
            halves.insert(0, Text(array("i")))
            del halves[2:]
        halves[0].tokens.extend(token_ids[-HALF_TOKENS:])

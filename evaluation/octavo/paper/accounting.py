"""Accounts for a replica's KV memory: tokens that are there, room for those to come, and what is of use to nobody."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from octavo.paper.contiguous_kv import ContiguousKV
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.kv.blocks import present


@dataclass(frozen=True, slots=True)
class Shares:
    """Divides a replica's slots into shares whose sum is 1.

    `tokens` hold computed KV, what is shared once; `reserved` will be filled by requests that run; `internal` was
    reserved for them and will not; and `external` is all that nobody asked for: what a buddy allocator rounds up, and
    what is free. As in the paper, internal waste is what is known only when a request has ended, and external waste is
    known before.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


def shares_of(replica: Replica) -> Shares:
    """Returns the present shares of contiguous or paged memory."""
    return _of_chunks(replica.kv) if isinstance(replica.kv, ContiguousKV) else _of_blocks(replica)


def _of_chunks(kv: ContiguousKV) -> Shares:
    """A group's spare chunks, of beams that are still to be forked, count as reserved as far as they will be filled."""
    allotments = list({holding.allotment: None for holding in kv.holdings.values()})
    tokens = sum(
        sequence.placement.num_computed for sequence, holding in kv.holdings.items() if holding.chunk is not None
    )
    asked = sum(each.asked * len(each.chunks) for each in allotments)
    used = sum(each.used * len(each.chunks) for each in allotments)
    return _shares(kv.buddy.size, tokens, used, asked)


def _of_blocks(replica: Replica) -> Shares:
    """The empty slots of a block are reserved or internal waste as far as its sequences go on."""
    kv, size = replica.kv, replica.kv.block_size
    filled: dict[int, int] = {}
    to_fill: dict[int, int] = {}
    for group in replica.running:
        for sequence in group.holders:
            block_ids = present(kv.block_table(sequence))
            _fill(filled, block_ids, size, sequence.placement.num_computed)
            _fill(to_fill, block_ids, size, group.longest)
    return _shares(kv.num_blocks * size, sum(filled.values()), sum(to_fill.values()), len(filled) * size)


def _shares(slots: int, tokens: int, used: int, asked: int) -> Shares:
    """Returns the shares of `slots`, of which `asked` were asked for, `used` of these will be filled and `tokens`
    are."""
    return Shares(tokens / slots, (used - tokens) / slots, (asked - used) / slots, 1 - asked / slots)


def _fill(filled: dict[int, int], block_ids: list[int], size: int, num_tokens: int) -> None:
    """Each block as full as the fullest of its holders has it."""
    full, rest = divmod(num_tokens, size)
    for block_id in block_ids[:full]:
        filled[block_id] = size
    for block_id in block_ids[full : full + 1]:
        filled[block_id] = max(filled.get(block_id, 0), rest)
    for block_id in block_ids[full + 1 :]:
        filled.setdefault(block_id, 0)


class MemoryProbe:
    """Looks at all replicas at every sample from `skip_s` on."""

    def __init__(self, skip_s: float = 0.0) -> None:
        self._skip_s = skip_s
        self._all: list[Shares] = []
        self._saturated: list[Shares] = []

    def __call__(self, time: float, core: Scheduler) -> None:
        if time < self._skip_s:
            return
        found = [shares_of(replica) for replica in core.replicas.values()]
        self._all += found
        if core.waiting:
            self._saturated += found

    @property
    def all(self) -> Shares | None:
        """Returns the mean over all samples; None if there was none."""
        return _mean(self._all)

    @property
    def saturated(self) -> Shares | None:
        """Returns the mean over the samples at which requests waited, which is what figure 2 of the paper shows: only
        then is free memory of no use."""
        return _mean(self._saturated)


def _mean(shares: Sequence[Shares]) -> Shares | None:
    if not shares:
        return None
    return Shares(
        fmean(each.tokens for each in shares),
        fmean(each.reserved for each in shares),
        fmean(each.internal for each in shares),
        fmean(each.external for each in shares),
    )

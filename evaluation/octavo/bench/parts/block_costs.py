"""What a KV block costs the scheduler in each of the ways it is handled."""

import statistics
from collections import defaultdict
from dataclasses import dataclass

from octavo.bench.parts.cpu_time import timed
from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.scheduler.kv.prefix_cache import block_hashes
from octavo.wire import history

_BLOCK_SIZE = 16
_NUM_BLOCKS = 256


@dataclass(frozen=True)
class BlockCosts:
    """Medians in nanoseconds per block: hashing its tokens; giving it to a sequence, as a new one (`allocate`) or found
    in the prefix cache (`share`); offering it to the cache (`index`); looking it up there; and taking it back."""

    hash: float
    allocate: float
    index: float
    look_up: float
    share: float
    free: float


def block_costs(repeat: int = 200) -> BlockCosts:
    """Prompts of 256 full blocks and one token, one after the other through a pool of 16 times as many."""
    kv = KVCacheManager(16 * _NUM_BLOCKS, _BLOCK_SIZE)
    costs: defaultdict[str, list[float]] = defaultdict(list)
    for index in range(repeat):
        for name, microseconds in _life(kv, index):
            costs[name].append(1000 * microseconds / _NUM_BLOCKS)
    return BlockCosts(**{name: statistics.median(values) for name, values in costs.items()})


def _life(kv: KVCacheManager, index: int) -> list[tuple[str, float]]:
    """A prompt is computed and goes; another one like it comes, and finds all of its full blocks."""
    first, twin = _sequence(index), _sequence(index)
    block_hashes(twin, _BLOCK_SIZE)
    costs = [("hash", timed(block_hashes, first, _BLOCK_SIZE)[1]), ("allocate", timed(kv.allocate, [first])[1])]
    first.num_computed = first.num_known
    costs.append(("index", timed(kv.index, first, index)[1]))
    kv.step_answered(index, valid=True)
    costs.append(("free", timed(kv.free, first)[1]))
    found, look_up = timed(kv.num_found, [twin])
    assert found == _NUM_BLOCKS * _BLOCK_SIZE, f"{found} tokens found"
    costs += [("look_up", look_up), ("share", timed(kv.allocate, [twin])[1])]
    kv.free(twin)
    return costs


def _sequence(index: int) -> Sequence:
    tokens = list(range(index, index + _NUM_BLOCKS * _BLOCK_SIZE + 1))
    return Sequence(index=0, prompt_token_ids=tokens, generated_token_ids=[], history_hash=history.EMPTY)

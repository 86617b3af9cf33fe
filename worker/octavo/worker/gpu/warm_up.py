"""Steps that nobody has asked for: kernels are compiled for them, and not while a request waits."""

from collections.abc import Iterator

from octavo.wire.sampling import SamplingParams
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.forward import Paging

# So many tokens before a chunk are split between programs, where it is small.
_CONTEXT = 1024


def warm_up_items(paging: Paging, num_blocks: int, most_tokens: int) -> Iterator[WorkItem]:
    """Chunks of 1, 2, 4, ... up to `most_tokens` tokens, at the start of a prompt and after some context, as far as
    `num_blocks` blocks that nobody owns have room. Kernels are configured by powers of two at the finest."""
    room = min(paging.max_model_len, num_blocks // len(paging.groups) * paging.block_size)
    num_tokens = 1
    while num_tokens <= min(room, most_tokens):
        for start in sorted({0, min(room - num_tokens, _CONTEXT)}):
            yield _item(paging, start, num_tokens)
        num_tokens *= 2


def _item(paging: Paging, start: int, num_tokens: int) -> WorkItem:
    """Its context counts as computed: whatever the blocks hold costs as much. It chooses no token."""
    length = start + num_tokens
    width = -(-length // paging.block_size)
    tables = [list(range(first, first + width)) for first in range(0, len(paging.groups) * width, width)]
    sequence = WorkerSequence(0, 0, SamplingParams(max_tokens=1), length, [0] * length, start, tables)
    return WorkItem(sequence, start, num_tokens, ())

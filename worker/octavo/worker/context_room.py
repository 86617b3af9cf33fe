"""Whether the KV blocks of a worker hold one sequence of the longest length it offers."""

from octavo.worker.runner import Runner


class ContextRoomError(Exception):
    """They do not, with what would make them."""


def check_context_room(runner: Runner) -> None:
    """Raises `ContextRoomError` if a sequence of `max_model_len` tokens does not fit, with both remedies in figures."""
    length, groups, block_size = runner.model.max_model_len, len(runner.kv_groups), runner.block_size
    needed = -(-length // block_size) * groups
    if runner.num_blocks >= needed:
        return
    # A block holds the keys and values of one KV group.
    block_bytes = block_size * runner.kv_bytes_per_token // groups
    held = runner.num_blocks // groups * block_size
    shorter = f"--max-model-len {held}" if held else "--max-model-len with a smaller --block-size"
    raise ContextRoomError(
        f"the KV cache of {runner.num_blocks} blocks ({runner.num_blocks * block_bytes} bytes) holds {held} tokens of a"
        f" sequence and the context has {length}, which takes {needed} blocks: give --kv-cache-memory"
        f" {needed * block_bytes}, or shorten the context with {shorter}"
    )

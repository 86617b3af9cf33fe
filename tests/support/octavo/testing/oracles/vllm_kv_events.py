"""KV events as vLLM defines them: by the classes that its publisher encodes and its subscribers decode, batches are
read here as strangers read them.

Fields and their order are those of `vllm/distributed/kv_events.py`: events were arrays until vLLM 0.23, and are maps
since, with a `locality` from 0.26 on. A batch is an array still.
"""

from typing import Any

import msgspec


class _Array(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class _Map(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


_Hash = int | bytes
_ExtraKeys = list[tuple[Any, ...] | None] | None


def _events(base: type[msgspec.Struct], *since: tuple[str, Any, Any]) -> tuple[Any, Any, Any]:
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[_Hash]),
            ("parent_block_hash", _Hash | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", _ExtraKeys, None),
            ("group_idx", int | None, None),
            ("kv_cache_spec_kind", str | None, None),
            ("kv_cache_spec_sliding_window", int | None, None),
            *since,
        ],
        bases=(base,),
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [
            ("block_hashes", list[_Hash]),
            ("medium", str | None),
            ("group_idx", int | None, None),
            *since,
        ],
        bases=(base,),
    )
    return stored, removed, msgspec.defstruct("AllBlocksCleared", [], bases=(base,))


BlockStored, BlockRemoved, AllBlocksCleared = _events(_Array)
BlockStoredMap, BlockRemovedMap, AllBlocksClearedMap = _events(_Map, ("locality", str | None, None))


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A batch as it is published."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _ArrayBatch(KVEventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]  # type: ignore[valid-type]


class _MapBatch(KVEventBatch):
    events: list[BlockStoredMap | BlockRemovedMap | AllBlocksClearedMap]  # type: ignore[valid-type]


def decode(payload: bytes, *, as_map: bool = False) -> KVEventBatch:
    """Decodes a batch of events in one form. Raises `msgspec.ValidationError` on what vLLM would not publish."""
    return msgspec.msgpack.decode(payload, type=_MapBatch if as_map else _ArrayBatch)


class Router:
    """Knows what one engine holds, by its events in either form; it matches prompts by tokens alone."""

    def __init__(self) -> None:
        # By hash: all tokens up to the block's end.
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.num_cleared = 0

    def follow(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    prefix = () if event.parent_block_hash is None else self.prefix_of[event.parent_block_hash]
                    for index, value in enumerate(event.block_hashes):
                        prefix += tuple(event.token_ids[index * event.block_size :][: event.block_size])
                        self.prefix_of[value] = prefix
                case "BlockRemoved":
                    for value in event.block_hashes:
                        del self.prefix_of[value]
                case "AllBlocksCleared":
                    self.num_cleared += 1
                    self.prefix_of.clear()

    def num_matched(self, token_ids: list[int]) -> int:
        """Counts the tokens of a prompt that the engine holds."""
        held = set(self.prefix_of.values())
        return max((n for n in range(len(token_ids) + 1) if tuple(token_ids[:n]) in held), default=0)

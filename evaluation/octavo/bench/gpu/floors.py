"""Counts the least time that work can take: bytes and operations, from shapes, over the rates of this machine.

Every input counts as read once and every output as written once. Device memory counts bytes read plus bytes written.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from octavo.bench.gpu.shapes import AttentionShape, DecoderShape


@dataclass(frozen=True)
class Ceilings:
    """Rates that this machine reaches: of device memory, of bf16 matrix products, and of pinned memory both ways."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


# The rates of one H200, for a plan made before anything is measured.
NOMINAL = Ceilings(4.3e12, 780e12, 51e9, 51e9)


@dataclass(frozen=True)
class DeviceWork:
    """Counts work that can go on at the same time: bytes of device memory, operations, bytes to the device and to the
    host."""

    bytes: float = 0
    flops: float = 0
    to_device: float = 0
    to_host: float = 0

    def seconds(self, ceilings: Ceilings) -> float:
        return max(
            self.bytes / ceilings.copy_bytes_per_s,
            self.flops / ceilings.gemm_flops_per_s,
            self.to_device / ceilings.to_device_bytes_per_s,
            self.to_host / ceilings.to_host_bytes_per_s,
        )


# What must be done one after the other.
Floor = Sequence[DeviceWork]


def floor_s(floor: Floor, ceilings: Ceilings) -> float:
    return sum(work.seconds(ceilings) for work in floor)


def decode_attention(contexts: Iterable[int], shape: AttentionShape) -> DeviceWork:
    """Counts the work of one layer with one query token per sequence: every key and value is read once, whatever the
    number of query heads."""
    contexts = list(contexts)
    moved = sum(contexts) * shape.kv_bytes_per_token + 2 * len(contexts) * shape.query_bytes_per_token
    return DeviceWork(bytes=moved, flops=4 * sum(contexts) * shape.query_heads * shape.head_dim)


def visible_pairs(num_tokens: int, history: int) -> int:
    """Pairs of one of `num_tokens` queries and a key that it sees, `history` tokens being before all of them."""
    return num_tokens * history + num_tokens * (num_tokens + 1) // 2


def prefill_attention(num_tokens: int, history: int, shape: AttentionShape) -> DeviceWork:
    """Counts the attention of one layer for one chunk of a prompt."""
    moved = (history + num_tokens) * shape.kv_bytes_per_token + 2 * num_tokens * shape.query_bytes_per_token
    return DeviceWork(bytes=moved, flops=4 * visible_pairs(num_tokens, history) * shape.query_heads * shape.head_dim)


def cache_write(num_tokens: int, shape: AttentionShape) -> DeviceWork:
    """Counts one layer's new keys and values, read and written."""
    return DeviceWork(bytes=2 * num_tokens * shape.kv_bytes_per_token)


def block_copies(num_bytes: int) -> DeviceWork:
    """Blocks within the device, `num_bytes` of them."""
    return DeviceWork(bytes=2 * num_bytes)


def decode_step(contexts: Sequence[int], model: DecoderShape) -> list[DeviceWork]:
    """Counts every weight once, or the matrix products of all sequences; then their keys and values."""
    dense = DeviceWork(bytes=model.weight_bytes, flops=2 * model.linear.num_weights * len(contexts))
    return [dense, DeviceWork(bytes=sum(contexts) * model.kv_bytes_per_token)]


def prefill(lengths: Sequence[int], model: DecoderShape) -> list[DeviceWork]:
    """Counts the work of whole prompts: matrix products, then causal attention; one row of each prompt goes through the
    LM head."""
    dense = 2 * (sum(lengths) * model.layer_weights + len(lengths) * model.head_weights)
    pairs = sum(visible_pairs(length, 0) for length in lengths)
    shape = model.attention
    attention = 4 * pairs * shape.query_heads * shape.head_dim * model.num_layers
    return [DeviceWork(bytes=model.weight_bytes, flops=dense), DeviceWork(flops=attention)]


def serving(lengths: Sequence[tuple[int, int]], model: DecoderShape) -> list[DeviceWork]:
    """Requests of so many prompt and output tokens that arrive together: all prompts first, then every step with all
    that are not at their end yet."""
    return [*prefill([prompt for prompt, _ in lengths], model), *_decode_steps(lengths, model)]


def _decode_steps(lengths: Sequence[tuple[int, int]], model: DecoderShape) -> Iterator[DeviceWork]:
    """Counts the decode steps of all requests at once; each prompt brings the first token."""
    for step in range(1, max(output for _, output in lengths)):
        yield from decode_step([prompt + step for prompt, output in lengths if output > step], model)


def rotations(num_bytes: int, at_least: int = 240 << 20) -> int:
    """Returns how many sets of inputs of `num_bytes` to use in turns, so that no set is still in a cache when it comes
    again."""
    return max(2, -(-at_least // num_bytes))

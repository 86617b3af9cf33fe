"""Turns the product of the fused query, key and value weights into what attention reads, in one launch.

The kernel norms heads, applies rotary position embedding (Su et al., "RoFormer", 2021), and writes keys and values into
their slots of the paged cache. A program takes one token's heads of some KV heads, with the queries that share them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.checks import check_caches
from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.arguments import check_dtypes
from octavo.kernels.triton.language import POINTERS, block_for, cached

# A program's query heads, if a KV head has no more: fewer leave threads without work, more leave multiprocessors so.
_QUERY_HEADS = 8
# Small programs: as many as a multiprocessor takes (32) fill its warps (64).
_NUM_WARPS = 2
_CACHE_POINTERS = {**POINTERS, torch.float8_e4m3fn: "*fp8e4nv"}


@triton.jit
def _turn(
    heads, targets, present, weight, cos, sin, eps, scale, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Norms and turns those of `heads` that are `present`, and stores them (all three [heads, 1], two of pointers). A
    head is two halves that turn with each other, and a rest: a thread holds both numbers of a pair."""
    dims = tl.arange(0, HALF_BLOCK)[None, :]
    rest_dims = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    half_mask, rest_mask = dims < HALF, rest_dims < HEAD_DIM
    first = tl.load(heads + dims, present & half_mask, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF + dims, present & half_mask, other=0.0).to(tl.float32)
    rest = tl.load(heads + rest_dims, present & rest_mask, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first *= inverse * tl.load(weight + dims, half_mask, other=0.0)
        second *= inverse * tl.load(weight + HALF + dims, half_mask, other=0.0)
        rest *= inverse * tl.load(weight + rest_dims, rest_mask, other=0.0)
    dtype = targets.dtype.element_ty
    tl.store(targets + dims, cached(first * cos - second * sin, scale, dtype), present & half_mask)
    tl.store(targets + HALF + dims, cached(second * cos + first * sin, scale, dtype), present & half_mask)
    tl.store(targets + rest_dims, cached(rest, scale, dtype), present & rest_mask)


# Both may begin anywhere in larger arrays, and that must not make Triton compile anew.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rope_and_cache_kernel(
    qkv,
    query,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    key_cache,
    value_cache,
    slot_mapping,
    num_kv_heads,
    qkv_stride,
    block_stride,
    slot_stride,
    head_stride,
    eps,
    key_scale,
    value_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    num_heads = num_kv_heads * GROUP
    row = qkv + token * qkv_stride
    angle_cos, angle_sin = 1.0, 0.0
    if cos is not None:
        dims = tl.arange(0, HALF_BLOCK)[None, :]
        angle = tl.load(positions + token) * HALF + dims
        angle_cos = tl.load(cos + angle, dims < HALF, other=1.0)
        angle_sin = tl.load(sin + angle, dims < HALF, other=0.0)

    # -- queries --
    place = tl.arange(0, QUERY_HEADS)[:, None]
    head = tl.program_id(1) * KV_HEADS * GROUP + place
    present = (place < KV_HEADS * GROUP) & (head < num_heads)
    source = row + head * HEAD_DIM
    target = query + token * num_heads * HEAD_DIM + head * HEAD_DIM
    _turn(source, target, present, q_norm, angle_cos, angle_sin, eps, 1.0, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)

    # -- keys and values, but of tokens that have no slot --
    slot = tl.load(slot_mapping + token)
    kv_head = tl.program_id(1) * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
    present = kv_head < tl.where(slot >= 0, num_kv_heads, 0)
    source = row + (num_heads + kv_head) * HEAD_DIM
    target = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + kv_head * head_stride
    _turn(
        source, key_cache + target, present, k_norm, angle_cos, angle_sin, eps, key_scale,
        HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK,
    )  # fmt: skip
    dims = tl.arange(0, HEAD_BLOCK)[None, :]
    present &= dims < HEAD_DIM
    values = tl.load(source + num_kv_heads * HEAD_DIM + dims, present, other=0.0).to(tl.float32)
    dtype = value_cache.dtype.element_ty
    tl.store(value_cache + target + dims, cached(values, value_scale, dtype), present)


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Returns the queries of `qkv`, normed and turned; its keys, treated alike, and its values go to the cache.

    `qkv`: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows of query heads, key heads, value heads, left as it
    is; `positions`: [tokens] int64, each below max_position; `cos`, `sin`: [max_position, rotary_dim / 2] fp32, of the
    first rotary_dim dimensions, whose one half turns with the other; None: no head turns. `q_norm`, `k_norm`:
    [head_dim] fp32, over each head; None: there is no norm. Caches: [num_blocks, block_size, num_kv_heads, head_dim] of
    any equal strides but the last, which is 1; of the dtype of `qkv`, or float8_e4m3fn, which holds keys / `key_scale`
    and values / `value_scale` bounded by its largest number. `slot_mapping`: [tokens] int64, slot = block id * block
    size + offset; where it is negative nothing is written.

    The result, [tokens, num_heads, head_dim], is a tensor of its own: it costs no more writing than turning the queries
    in place, its rows lie close for attention to read, and no thread can write what another has yet to read. All is
    computed in fp32 and rounded once, to what is stored: torch's operations round after the norm and after the turn.
    Raises `ValueError` on arguments that do not fit.
    """
    check_caches(key_cache, value_cache)
    if key_cache.shape[2] != num_kv_heads:
        raise ValueError(f"{num_kv_heads} KV heads for a cache of {key_cache.shape[2]}")
    rotary_dim = 0 if cos is None else 2 * cos.shape[-1]
    shape = _Shape(num_heads, num_kv_heads, key_cache.shape[3], rotary_dim, key_cache.shape[1])
    _check_tokens(qkv, positions, slot_mapping, shape)
    check_dtypes(qkv, key_cache, key_scale, value_scale)
    _check_tables(cos, sin, q_norm, k_norm, shape)
    tokens, kv_heads_each = qkv.shape[0], shape.kv_heads_each
    query = torch.empty((tokens, num_heads, shape.head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return query
    _rope_and_cache_kernel[(tokens, -(-num_kv_heads // kv_heads_each))](
        qkv,
        query,
        positions,
        cos,
        sin,
        q_norm,
        k_norm,
        key_cache,
        value_cache,
        slot_mapping,
        num_kv_heads,
        qkv.stride(0),
        *key_cache.stride()[:3],
        eps,
        key_scale,
        value_scale,
        **shape.constants,
        num_warps=_NUM_WARPS,
    )
    return query


@dataclass(frozen=True)
class _Shape:
    """Describes the heads of one layer and its cache. With a `rotary_dim` of 0 no dimension is rotated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    block_size: int

    def __post_init__(self) -> None:
        if not (1 <= self.num_kv_heads <= self.num_heads and self.num_heads % self.num_kv_heads == 0):
            raise ValueError(f"{self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly")
        if not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"{self.rotary_dim} dimensions of a head of {self.head_dim} turn")

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kv_heads_each(self) -> int:
        """Returns the number of KV heads that a program takes: a power of two."""
        wanted = max(1, _QUERY_HEADS // self.group)
        return min(1 << (wanted.bit_length() - 1), block_for(self.num_kv_heads))

    @property
    def constants(self) -> dict[str, int]:
        # Heads that do not turn are cut up alike, so that a norm is computed alike.
        half = self.rotary_dim // 2 or self.head_dim // 2
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "HALF": half,
            "HALF_BLOCK": block_for(half),
            "REST_BLOCK": block_for(max(1, self.head_dim - 2 * half)),
            "HEAD_BLOCK": block_for(self.head_dim),
            "KV_HEADS": self.kv_heads_each,
            "QUERY_HEADS": block_for(self.kv_heads_each * self.group),
            "BLOCK_SIZE": self.block_size,
        }


def _check_tokens(qkv: Tensor, positions: Tensor, slot_mapping: Tensor, shape: _Shape) -> None:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if not (qkv.dim() == 2 and qkv.shape[1] == width and qkv.stride(1) == 1):
        raise ValueError(f"qkv is {list(qkv.shape)} of strides {qkv.stride()}, expected [tokens, {width}]")
    for name, given in (("positions", positions), ("slot_mapping", slot_mapping)):
        if not (given.shape == qkv.shape[:1] and given.dtype == torch.int64 and given.is_contiguous()):
            raise ValueError(f"{name} is {list(given.shape)} {given.dtype}, expected [{len(qkv)}] torch.int64")


def _check_tables(
    cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, shape: _Shape
) -> None:
    for name, pair, width in (
        ("cos and sin", (cos, sin), shape.rotary_dim // 2),
        ("norms of heads", (q_norm, k_norm), shape.head_dim),
    ):
        if len({table is None for table in pair}) > 1:
            raise ValueError(f"{name}: there is one without the other")
        for table in pair:
            if table is not None:
                _check_table(name, table, width)


def _check_table(name: str, table: Tensor, width: int) -> None:
    if not (table.shape[-1] == width and table.dtype == torch.float32 and table.is_contiguous()):
        raise ValueError(f"{name} are {list(table.shape)} {table.dtype}, expected [..., {width}] torch.float32")


def variants() -> Iterator[Variant]:
    """Yields every head size and group, whole, partial and no rotation, norms, and every dtype of models and caches."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    yield _variant(_Shape(32, 8, 128, 128, 16), bf16, bf16)
    yield _variant(_Shape(32, 8, 128, 128, 16), bf16, bf16, norms=True)
    yield _variant(_Shape(32, 8, 128, 128, 16), bf16, fp8, norms=True)
    yield _variant(_Shape(28, 4, 128, 128, 16), bf16, bf16)
    yield _variant(_Shape(9, 3, 64, 64, 16), torch.float16, torch.float16)
    yield _variant(_Shape(9, 3, 64, 64, 16), torch.float16, fp8)
    yield _variant(_Shape(32, 32, 80, 80, 16), torch.float32, torch.float32)
    yield _variant(_Shape(24, 8, 96, 72, 16), bf16, bf16)
    yield _variant(_Shape(32, 2, 128, 64, 32), bf16, bf16)
    yield _variant(_Shape(8, 1, 256, 256, 64), bf16, bf16, norms=True)
    yield _variant(_Shape(16, 4, 128, 0, 1), bf16, bf16)
    yield _variant(_Shape(16, 4, 128, 0, 256), torch.float32, fp8, norms=True)


def _variant(shape: _Shape, dtype: torch.dtype, cache_dtype: torch.dtype, *, norms: bool = False) -> Variant:
    absent = [*(() if shape.rotary_dim else ("cos", "sin")), *(() if norms else ("q_norm", "k_norm"))]
    strides = ("qkv_stride", "block_stride", "slot_stride", "head_stride")
    heads = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, {shape.rotary_dim} turn"
    return Variant(
        name=f"rope_and_cache {heads} {POINTERS[dtype][1:]} {_CACHE_POINTERS[cache_dtype][1:]}{' normed' * norms}",
        kernel=_rope_and_cache_kernel,
        signature={
            **dict.fromkeys(("qkv", "query"), POINTERS[dtype]),
            **dict.fromkeys(("positions", "slot_mapping"), "*i64"),
            **dict.fromkeys(("cos", "sin", "q_norm", "k_norm"), "*fp32"),
            **dict.fromkeys(("key_cache", "value_cache"), _CACHE_POINTERS[cache_dtype]),
            **dict.fromkeys(("num_kv_heads", *strides), "i32"),
            **dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32"),
        },
        constants={**shape.constants, **dict.fromkeys(absent)},
        num_warps=_NUM_WARPS,
        aligned=frozenset(strides),
    )

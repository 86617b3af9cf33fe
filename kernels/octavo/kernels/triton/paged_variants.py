"""Lists the configurations in which the kernels of paged attention are launched."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from octavo.kernels.triton.ahead import Variant
from octavo.kernels.triton.devices import HOPPER, shared_limit
from octavo.kernels.triton.language import POINTERS
from octavo.kernels.triton.launch import COMBINING_WARPS, TILE_SPLITS, SequenceRange, tile_constants
from octavo.kernels.triton.paged import attend_kernel, combine_kernel
from octavo.kernels.triton.tiles import (
    DECODE_SPLIT_KEYS,
    EXACT_SPLIT_KEYS,
    Tiles,
    decode_tiles,
    exact_tiles,
    fitted,
    prefill_tiles,
)

_CACHE_POINTERS = {**POINTERS, torch.float8_e4m3fn: "*fp8e4nv"}
_INTEGERS = {name for name in attend_kernel.arg_names if name.endswith("_stride")}
_COUNTS = ("window", "num_kv_heads", "num_splits", "first_tile", "first_sequence", "last_sequence", "split_rows")


@dataclass(frozen=True)
class _Case:
    """Holds the facts that decide a configuration. `mode`: "decode", "prefill" or "exact"."""

    mode: str
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    max_query_len: int = 2048
    split: bool = False
    windowed: bool = False
    capped: bool = False
    sinks: bool = False
    alibi: bool = False
    shared: int = shared_limit(HOPPER)

    @property
    def cached(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def share(self) -> SequenceRange:
        match self.mode:
            case "decode":
                tiles = decode_tiles(self.group, self.head_dim, self.dtype, self.cached)
                return SequenceRange(0, 0, 0, 1, self._fitted(tiles), decode=True, least_keys=DECODE_SPLIT_KEYS)
            case "prefill":
                tiles = prefill_tiles(self.group, self.head_dim, self.dtype, self.max_query_len)
                return SequenceRange(0, 0, 0, self.max_query_len, self._fitted(tiles))
            case _:
                tiles = self._fitted(exact_tiles(self.group, self.head_dim, self.dtype), keeps_rows=True)
                return SequenceRange(0, 0, 0, self.max_query_len, tiles, split_keys=EXACT_SPLIT_KEYS)

    def _fitted(self, tiles: Tiles, *, keeps_rows: bool = False) -> Tiles:
        return fitted(tiles, self.group, self.head_dim, self.dtype, self.cached, self.shared, keeps_rows=keeps_rows)

    @property
    def signature(self) -> dict[str, str]:
        return {
            **dict.fromkeys(("output", "query"), POINTERS[self.dtype]),
            **dict.fromkeys(("key_cache", "value_cache"), _CACHE_POINTERS[self.cached]),
            **dict.fromkeys(("split_sums", "split_scores", "alibi_slopes"), "*fp32"),
            "sinks": POINTERS[self.dtype],
            **dict.fromkeys(("pieces", "counts", "block_tables", "table_rows", "context_lens", "query_starts"), "*i32"),
            **dict.fromkeys(("scale", "softcap", "value_scale"), "fp32"),
            **dict.fromkeys(_COUNTS, "i32"),
            **dict.fromkeys(_INTEGERS, "i32"),
        }

    def __str__(self) -> str:
        flags = ("split", "windowed", "capped", "sinks", "alibi")
        parts = (
            f"{self.mode} {POINTERS[self.dtype][1:]} from {_CACHE_POINTERS[self.cached][1:]}",
            f"groups of {self.group}",
            f"heads of {self.head_dim}",
            f"blocks of {self.block_size}",
            f"tiles of {self.share.tiles.rows}",
            *(flag for flag in flags if getattr(self, flag)),
        )
        return ", ".join(parts)


def variants(capability: int = HOPPER) -> Iterator[Variant]:
    """Yields a covering set of dtypes, head sizes, groups, block sizes, sizes of tiles and ways to score."""
    for case in _cases():
        case = replace(case, shared=shared_limit(capability))
        yield _attending(case)
        if case.split:
            yield _combining(case)


def _cases() -> Iterator[_Case]:
    fp16, fp32, fp8 = torch.float16, torch.float32, torch.float8_e4m3fn
    for mode in ("decode", "prefill", "exact"):
        plain = _Case(mode)
        yield plain
        yield replace(plain, split=True, group=7, block_size=32)
        yield replace(plain, cache_dtype=fp8, head_dim=96, group=8, block_size=64, windowed=True)
        yield replace(plain, dtype=fp16, head_dim=64, group=3, block_size=256, sinks=True, windowed=True)
        yield replace(plain, dtype=fp32, head_dim=80, group=1, block_size=1, alibi=True, split=True)
        yield replace(plain, dtype=fp16, head_dim=256, group=2, capped=True, windowed=True, split=True, sinks=True)
    yield _Case("decode", cache_dtype=fp8, split=True)
    yield _Case("decode", fp32, fp8, head_dim=64)
    yield _Case("decode", group=71, head_dim=64)
    yield _Case("prefill", max_query_len=4)
    yield _Case("prefill", max_query_len=16, head_dim=256)
    yield _Case("exact", fp16, fp8, head_dim=64, group=1)


def _attending(case: _Case) -> Variant:
    share = case.share
    flags = {"WINDOWED": case.windowed, "CAPPED": case.capped, "MASK_ALL": share.mask_all(case.windowed)}
    sizes = tile_constants(case.group, case.head_dim, share) | {"BLOCK_SIZE": case.block_size}
    return Variant(
        name=f"attend: {case}",
        kernel=attend_kernel,
        signature=case.signature,
        constants=_absent(case) | sizes | flags,
        num_warps=share.tiles.warps,
        num_stages=share.tiles.stages,
        aligned=frozenset(_INTEGERS - {"table_stride"}),
        fuses=share.fuses,
        requires_wgmma=case.mode == "exact" and case.dtype != torch.float32,
    )


def _combining(case: _Case) -> Variant:
    absent = {name: None for name in _absent(case) if name in ("counts", "sinks")}
    return Variant(
        name=f"combine: {case}",
        kernel=combine_kernel,
        signature=case.signature,
        constants=absent | tile_constants(case.group, case.head_dim, case.share) | {"TILE_SPLITS": TILE_SPLITS},
        num_warps=COMBINING_WARPS,
        aligned=frozenset(_INTEGERS & set(combine_kernel.arg_names)),
        fuses=case.share.fuses,
    )


def _absent(case: _Case) -> dict[str, None]:
    # Decodes and exact attention have a list of their pieces.
    listed = case.split and case.mode != "prefill"
    present = {
        **dict.fromkeys(("split_sums", "split_scores"), case.split),
        **dict.fromkeys(("pieces", "counts"), listed),
        "sinks": case.sinks,
        "alibi_slopes": case.alibi,
    }
    return dict.fromkeys(name for name, given in present.items() if not given)

"""Chooses the implementation of paged attention that serves a cache, and says why a faster one does not."""

import importlib.util
from dataclasses import dataclass

import torch

from octavo.kernels.attention import TorchAttention
from octavo.kernels.backend import AttentionBackend, CacheShape
from octavo.kernels.native.attention import NativeAttention, obstacle
from octavo.kernels.native.library import NativeUnavailable, load


@dataclass(frozen=True)
class AttentionChoice:
    """Names the chosen backend. `reason` says why it is not the fast one of this device, with what to do about it; None
    if it is."""

    attention: AttentionBackend
    reason: str | None


def choose_attention(
    shape: CacheShape, device: torch.device, dtype: torch.dtype | None = None, *, exact: bool = False
) -> AttentionChoice:
    """Chooses Octavo's own kernels where they serve `shape`, on the CPU if they were compiled and on a GPU if there is
    Triton; else torch.

    `dtype` is the computation's, None for the cache's: on a CPU only Octavo's own kernels take another. With `exact` it
    chooses GPU kernels whose result for a token does not depend on what is computed beside it; the CPU's kernels are
    always so.
    """
    fallback = TorchAttention(shape, device)
    if device.type != "cpu":
        return _choose_gpu_attention(shape, device, fallback, exact=exact)
    try:
        library = load()
    except NativeUnavailable as error:
        return AttentionChoice(fallback, str(error))
    computed = shape.dtype if dtype is None else dtype
    if reason := obstacle(shape, computed):
        return AttentionChoice(fallback, reason)
    return AttentionChoice(NativeAttention(library, shape, computed), None)


def _choose_gpu_attention(
    shape: CacheShape, device: torch.device, fallback: AttentionBackend, *, exact: bool
) -> AttentionChoice:
    if importlib.util.find_spec("triton") is None:
        return AttentionChoice(
            fallback, "there is no Triton; install it with pip install '.[gpu]' in Octavo's source tree"
        )
    # Triton takes seconds to import, and a CPU has no use for it.
    from octavo.kernels.triton.attention import TritonAttention
    from octavo.kernels.triton.attention import obstacle as gpu_obstacle

    if reason := gpu_obstacle(shape):
        return AttentionChoice(fallback, reason)
    return AttentionChoice(TritonAttention(shape, device, exact=exact), None)

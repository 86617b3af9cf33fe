"""Chooses the implementation of paged attention that serves a cache, and says why a faster one does not."""

import importlib.util
import logging
from dataclasses import dataclass

import torch

from octavo.kernels.attention import TorchAttention
from octavo.kernels.backend import AttentionBackend, CacheShape
from octavo.kernels.native.attention import NativeAttention, obstacle
from octavo.kernels.native.library import NativeUnavailable, load

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionChoice:
    """Names the chosen backend. `reason` says why it is not the fast one of this device, with what to do about it; None
    if it is. `prompts` names what else computes prompts."""

    attention: AttentionBackend
    reason: str | None
    prompts: str | None = None


class BackendUnavailable(Exception):
    """Raised for a backend that was asked for by its name and cannot compute; the text says why."""


def choose_attention(
    shape: CacheShape,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    exact: bool = False,
    backend: str = "auto",
) -> AttentionChoice:
    """Chooses Octavo's own kernels where they serve `shape`, on the CPU if they were compiled and on a GPU if there is
    Triton; else torch.

    `dtype` is the computation's, None for the cache's: on a CPU only Octavo's own kernels take another. With `exact` it
    chooses GPU kernels whose result for a token does not depend on what is computed beside it; the CPU's kernels are
    always so. `backend` is a GPU's: `flashinfer` computes prompts by FlashInfer, or raises `BackendUnavailable`;
    `triton` does not; `auto` does where that works.
    """
    fallback = TorchAttention(shape, device)
    if device.type != "cpu":
        return _choose_gpu_attention(shape, device, fallback, exact=exact, backend=backend)
    try:
        library = load()
    except NativeUnavailable as error:
        return AttentionChoice(fallback, str(error))
    computed = shape.dtype if dtype is None else dtype
    if reason := obstacle(shape, computed):
        return AttentionChoice(fallback, reason)
    return AttentionChoice(NativeAttention(library, shape, computed), None)


def _choose_gpu_attention(
    shape: CacheShape, device: torch.device, fallback: AttentionBackend, *, exact: bool, backend: str
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
    if backend != "triton":
        try:
            return AttentionChoice(_with_flashinfer(shape, device, exact=exact), None, "FlashInfer")
        except BackendUnavailable as error:
            if backend == "flashinfer":
                raise
            logger.info("Triton computes prompts too: %s", error)
    return AttentionChoice(TritonAttention(shape, device, exact=exact), None)


def _with_flashinfer(shape: CacheShape, device: torch.device, *, exact: bool) -> AttentionBackend:
    from octavo.kernels import flashinfer

    if exact:
        raise BackendUnavailable("FlashInfer's sums depend on what else is computed, and exact ones must not")
    if reason := flashinfer.obstacle(shape):
        raise BackendUnavailable(reason)
    try:
        return flashinfer.FlashInferAttention(shape, device)
    except Exception as error:
        # It compiles kernels with whatever compiler there is, and fails in as many ways.
        raise BackendUnavailable(f"FlashInfer does not work here: {type(error).__name__}: {error}") from error

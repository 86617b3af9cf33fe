"""Which paged attention serves a cache, and why not a faster one."""

from dataclasses import dataclass

import torch

from octavo.kernels.attention import TorchAttention
from octavo.kernels.backend import AttentionBackend, CacheShape
from octavo.kernels.native.attention import NativeAttention, obstacle
from octavo.kernels.native.library import NativeUnavailable, load


@dataclass(frozen=True)
class Choice:
    """A backend, and `reason`: why it is not the fast one of this device, with what to do about it; None if it is."""

    attention: AttentionBackend
    reason: str | None


def choose_attention(shape: CacheShape, device: torch.device) -> Choice:
    """Octavo's own kernels where they were compiled and serve `shape`, else torch."""
    fallback = TorchAttention(shape, device)
    if device.type != "cpu":
        return Choice(fallback, None)
    try:
        library = load()
    except NativeUnavailable as error:
        return Choice(fallback, str(error))
    if reason := obstacle(shape):
        return Choice(fallback, reason)
    return Choice(NativeAttention(library, shape), None)

"""What all steps over one paged cache have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.kernels.backend import AttentionBackend
from octavo.wire.steps import KVGroup


@dataclass(frozen=True, slots=True)
class Paging:
    """Whose keys and values are where, and what computes attention over them."""

    attention: AttentionBackend
    groups: Sequence[KVGroup]
    block_size: int
    max_model_len: int
    device: torch.device

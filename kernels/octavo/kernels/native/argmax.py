"""Finds the largest logit of each row with Octavo's own kernel."""

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary


def argmax(library: NativeLibrary, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of each row of `logits` and its token id, [rows] fp32 and [rows] int64.

    `logits`: [rows, vocab_size] fp32, contiguous, on the CPU. Of equal logits the lowest id is returned; a NaN counts
    as the largest of all. Raises `ValueError` on other logits.
    """
    rows, size = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not size:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not rows of fp32 without gaps")
    values, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    library.functions.octavo_argmax(
        logits.data_ptr(), rows, size, values.data_ptr(), tokens.data_ptr(), torch.get_num_threads()
    )
    return values, tokens

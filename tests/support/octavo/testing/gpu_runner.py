"""A runner as on a GPU: on one where there is one, else on the CPU with Triton's interpreter, which is slow."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.kernels.backend import CacheShape
from octavo.kernels.choice import AttentionChoice
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models import gpu_linear, linear
from octavo.worker.models.linear import LinearKind
from octavo.worker.step import model_runner
from octavo.worker.step.model_runner import ModelRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gpu_runner(directory: Path, patch: pytest.MonkeyPatch, **options: Any) -> ModelRunner:
    """In fp32 with room for 512 tokens unless `options` say otherwise."""
    usual: dict[str, Any] = {
        "dtype": "float32",
        "num_blocks": 512 // options.get("block_size", 16),
        "threads": 1,
        "graph_batch": 8,
        "graph_tokens": 0,
    }
    settings = ModelSettings(**usual | options)
    if DEVICE == "cpu":
        # Triton takes seconds to import.
        from octavo.testing.interpreter import order_dots

        order_dots(patch)
        patch.setattr(model_runner, "choose_attention", _interpreted)
        patch.setattr(linear, "best_kind", lambda weight: LinearKind.PLAIN)
        patch.setattr(gpu_linear, "on_gpu", lambda device: True)
    return ModelRunner(directory, settings, device=DEVICE)


def _interpreted(
    shape: CacheShape, device: torch.device, dtype: torch.dtype, *, exact: bool, backend: str
) -> AttentionChoice:
    from octavo.kernels.triton.attention import TritonAttention

    return AttentionChoice(TritonAttention(shape, device, exact=exact), None)

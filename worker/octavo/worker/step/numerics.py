"""`--numerics exact`: a request's tokens and logprobs are the same to the last bit whatever runs beside it.

That is so where Octavo's own kernels compute all of a model: there each sum is added up in an order that follows from
its own row. It is not so elsewhere. Torch's matrix products and fused attention take other ways for other numbers of
rows, and on a CPU its SiLU, GELU and sigmoid round the last elements of a tensor, or of a thread's share, in another
way than those before. (He et al., "Defeating Nondeterminism in LLM Inference" (2025), on the same for GPUs.)
"""

import torch

from octavo.kernels.choice import Choice
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.program import obstacle

EXACT_CPU_DTYPE = "float32"


def settings_obstacle(dtype: str, device: torch.device) -> str | None:
    """Why these settings cannot be exact, and what to do; None if they can."""
    if device.type == "cpu" and dtype not in ("auto", EXACT_CPU_DTYPE):
        return f"computes in {EXACT_CPU_DTYPE} on a CPU; leave --dtype {dtype} out"
    return None


def model_obstacle(model: Decoder, attention: Choice) -> str | None:
    """Why `model` (compiled where it can be) with `attention` is not exact, and what to do; None if it is."""
    if isinstance(model, FusedLlama) and model.group.size > 1:
        return "needs ranks that add up in one order whatever the batch, which GPUs do not; leave it or --tp out"
    if isinstance(model, CompiledLlama | FusedLlama):
        return None
    if not isinstance(model, LlamaModel):
        return (
            "needs a model that Octavo computes itself; this one is computed by transformers, in operations whose last"
            " bits depend on the batch. Leave it out"
        )
    return f"needs Octavo's own kernels for the whole model: {attention.reason or obstacle(model)}"

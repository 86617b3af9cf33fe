"""Which kernels compute a model, said in words."""

from octavo.kernels.choice import Choice
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.llama import LlamaModel
from octavo.worker.models.program import obstacle


def kernel_path(attention: Choice, model: Decoder) -> str:
    """What computes `model` (compiled where it can be) with `attention`; where there is something faster, why it does
    not and what to do about it."""
    name = attention.attention.name
    if attention.reason:
        return f"{name} (not Octavo's own kernels: {attention.reason})"
    if isinstance(model, CompiledLlama | FusedLlama) or name == "torch":
        return name
    if isinstance(model, LlamaModel):
        return f"{name} for attention, torch for the rest ({obstacle(model)})"
    also = "" if name == "triton" else " and linear layers"
    return f"{name} for attention{also}, transformers for the rest"

"""The experts of a mixture on a GPU, by grouped products that wait for nothing: steps may be captured."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# The name of Octavo's own implementation in transformers' interface, beside its "eager" and "grouped_mm".
OWN = "octavo"
# The compute capabilities on which torch's grouped products take bf16 without waiting for the host (elsewhere they read
# the routing there), in rows of whole 16 bytes.
_GROUPED_ON, _GROUPED_ITEMS = (9, 10), 8


def choose_experts(model: PreTrainedModel, device: torch.device) -> str:
    """Returns the name of transformers' implementation of experts that suits `model` on `device`.

    "eager" reads the routing on the host, which costs a CPU nothing. On a GPU "grouped_mm" is chosen where it waits for
    nothing, and else Octavo's own.
    """
    if device.type != "cuda":
        return "eager"
    sizes = {size for parameter in model.parameters() if parameter.dim() == 3 for size in parameter.shape[1:]}
    fits = model.dtype == torch.bfloat16 and all(size % _GROUPED_ITEMS == 0 for size in sizes)
    if fits and torch.cuda.get_device_capability(device)[0] in _GROUPED_ON:
        return "grouped_mm"
    return OWN


def use_experts(model: PreTrainedModel, name: str) -> None:
    """Has the experts of `model` computed by the implementation called `name`."""
    if name == OWN:
        _register()
    model.set_experts_implementation(name)


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(OWN, grouped_experts)


def grouped_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes `experts`, a module of transformers, of `hidden` ([tokens, size]): the sum over each token's choices
    (`top_k_index`, [tokens, choices]), weighted by `top_k_weights`."""
    # Triton takes seconds to import, and a CPU has no use for it.
    from octavo.kernels.triton.layers.grouped import Routing, grouped_linear

    tokens, choices = top_k_index.shape
    routing = Routing.of(top_k_index.reshape(-1), experts.num_experts)
    transposed, name = experts.is_transposed, "gate_up_proj" if experts.has_gate else "up_proj"

    def bias(of: str) -> Tensor | None:
        found: Tensor | None = getattr(experts, f"{of}_bias") if experts.has_bias else None
        return found

    inner = grouped_linear(hidden, getattr(experts, name), bias(name), routing, copies=choices, transposed=transposed)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = grouped_linear(inner, experts.down_proj, bias("down_proj"), routing, transposed=transposed)
    if getattr(experts, "has_post_expert_norm", False):
        outputs = experts.post_expert_norm(outputs)
    weighted = outputs.view(tokens, choices, -1) * top_k_weights.reshape(tokens, choices, 1)
    return weighted.sum(dim=1).to(hidden.dtype)

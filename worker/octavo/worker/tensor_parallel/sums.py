"""Adding up what ranks computed, in their order: so a sum's bits depend on its terms alone."""

import torch
from torch import Tensor


def add_in_order(parts: Tensor, total: Tensor) -> Tensor:
    """The sum of `parts` ([ranks, *shape], two ranks or more), one after the other in float32, in the place of `total`
    ([*shape])."""
    if total.dtype == torch.float32:
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part
        return total
    wide = parts[0].float()
    for part in parts[1:]:
        wide += part
    return total.copy_(wide)

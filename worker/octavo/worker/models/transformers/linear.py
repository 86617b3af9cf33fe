"""The linear layers that replace those of a transformers model."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.worker.models.linear import Linear
from octavo.worker.models.transformers.names import Layout, StoredNames


class LinearModule(nn.Module):
    """An `octavo.worker.models.linear.Linear` where a model expects a module, for inputs with any leading dimensions.

    Before `pack` it is as torch's; after it, its weight can no longer be read. Some models multiply with the weight of
    a linear layer themselves, so `weight_is_read` remembers a read.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Takes `weight`, [out_features, in_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight_is_read = False
        self._weight: Tensor | None = weight
        self._linear: Linear | None = None

    @property
    def weight(self) -> Tensor:
        """Returns the weight, [out_features, in_features]. Raises `RuntimeError` once it is packed."""
        if self._weight is None:
            raise RuntimeError("a linear layer's weight is read that nobody read when the model was tried at start")
        self.weight_is_read = True
        return self._weight

    def pack(self) -> None:
        """Lays the weight out for this machine, unless the model reads it."""
        if self._weight is not None and not self.weight_is_read:
            self._linear = Linear(self._weight, self.bias)
            self._weight = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self._linear is None:
            assert self._weight is not None
            return F.linear(inputs, self._weight, self.bias)
        rows = inputs.reshape(-1, self.in_features)
        outputs = self._linear(rows) if len(rows) else rows.new_empty(0, self.out_features)
        return outputs.view(*inputs.shape[:-1], self.out_features)


class QuantizedLinearModule(nn.Module):
    """A linear layer whose weight stays quantised where a model expects a module, for inputs with any leading
    dimensions."""

    def __init__(self, linear: Linear, bias: Tensor | None) -> None:
        """Takes a `linear` without bias, whose weight is quantised, and the `bias`."""
        super().__init__()
        part = linear.product or linear.native[0]
        self.out_features, self.in_features = part.outputs, part.inputs
        self.bias: Tensor | None
        self.register_buffer("bias", bias, persistent=False)
        self._linear = linear

    @property
    def weight(self) -> Tensor:
        """Returns the weight, [out_features, in_features] fp32, made anew: some models multiply with it themselves."""
        if self._linear.product is not None:
            return self._linear.product.dequantize()
        return self._linear.rows(torch.arange(self.out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        outputs = self._linear(rows) if len(rows) else rows.new_empty(0, self.out_features)
        if self.bias is not None:
            outputs += self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)


def emptied(architecture: type[PreTrainedModel], weights: Collection[str]) -> type[PreTrainedModel]:
    """Returns the class of models like `architecture` whose parameters called `weights` have no inputs, and so no
    values."""
    build: Any = architecture.__init__

    def build_empty(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        build(model, config, *args, **kwargs)
        for name in weights:
            module = model.get_submodule(name.rpartition(".")[0])
            empty = module.weight.new_empty(len(module.weight), 0)
            module.register_parameter("weight", nn.Parameter(empty, requires_grad=False))

    return type(
        architecture.__name__, (architecture,), {"__init__": build_empty, "__module__": architecture.__module__}
    )


def put_quantized(model: nn.Module, weights: Mapping[str, Linear]) -> None:
    """Puts a `QuantizedLinearModule` in the place of each linear layer of whose weight, by its name, there is a linear
    layer without bias in `weights`."""
    for name, linear in weights.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        bias = model.get_submodule(name.removesuffix(".weight")).bias
        assert bias is None or isinstance(bias, Tensor)
        module = QuantizedLinearModule(linear, None if bias is None else bias.detach())
        setattr(model.get_submodule(parent), leaf, module)


def stored_linears(model: Any, names: StoredNames, stored: Iterable[str]) -> dict[str, str]:
    """Returns the parameters of `model` that are weights of linear layers, by the names of those tensors in `stored`
    that become all of one."""
    # A subclass may compute something else, and Conv1D keeps its weight transposed.
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
    parameters = {name: names.parameter(name) for name in stored}
    return {
        name: parameter
        for name, (parameter, layout) in parameters.items()
        if layout is Layout.SAME and parameter in linears
    }


def replace_linears(model: nn.Module) -> None:
    """Puts a `LinearModule`, not yet packed, in the place of every linear layer."""
    replaced: dict[nn.Module, LinearModule] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A subclass may compute something else.
            if type(child) in (nn.Linear, Conv1D):
                if child not in replaced:
                    replaced[child] = _replacement(child)
                setattr(parent, name, replaced[child])


def pack_linears(model: nn.Module) -> None:
    """Packs every `LinearModule` whose weight is never read, one after the other: no two copies of all weights exist at
    once."""
    for module in model.modules():
        if isinstance(module, LinearModule):
            module.pack()


def _replacement(module: nn.Module) -> LinearModule:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    # Conv1D keeps its weight transposed.
    oriented = weight.detach().t().contiguous() if isinstance(module, Conv1D) else weight.detach()
    return LinearModule(oriented, None if bias is None else bias.detach())

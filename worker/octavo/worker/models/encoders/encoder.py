"""`EncoderModel`: an encoder in torch, over texts side by side in one row, none of which sees another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.loading.weights import WeightSource
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.encoders.config import EncoderConfig
from octavo.worker.models.linear import ActivatedLinear, GatedLinear, Linear
from octavo.worker.models.rotary import RotaryConfig, RotaryTable, rotate


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Holds the texts of a step, one after the other: `input_ids`, `positions` (from 0 in each text) and `types`, by
    which models tell the texts of pairs apart, [tokens] int64 each; and the tokens of each text."""

    input_ids: Tensor
    positions: Tensor
    types: Tensor
    lengths: Sequence[int]

    @property
    def spans(self) -> Iterator[slice]:
        """Yields the place of each text."""
        begin = 0
        for length in self.lengths:
            yield slice(begin, begin + length)
            begin += length


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm (Ba et al., 2016). `weight` and `bias` are fp32."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        normed = F.layer_norm(hidden.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Computes attention and MLP beside a residual. Each has a norm before it or, of the residual too, behind it."""

    qkv: Linear
    output: Linear
    attention_norm: LayerNorm | None
    up: ActivatedLinear | GatedLinear
    down: Linear
    mlp_norm: LayerNorm
    window: int
    rotary: RotaryConfig | None


class Encoder(Protocol):
    """An encoder: gives the last hidden state of every token of every text."""

    @property
    def config(self) -> EncoderConfig: ...

    def forward(self, batch: TextBatch) -> Tensor:
        """Returns the last hidden states, [tokens, hidden_size]."""


class EncoderModel:
    """An `Encoder` with its weights on the CPU in `dtype`, computed by torch. Raises `WeightsError`,
    `ModelConfigError`."""

    def __init__(self, config: EncoderConfig, source: WeightSource, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self._source = source
        names, shapes = config.names, source.shapes()
        # Sources that make up what is taken know no names.
        self.prefix = next((p for p in names.prefixes if not shapes or f"{p}{names.tokens}.weight" in shapes), None)
        if self.prefix is None:
            raise ModelConfigError(f"the checkpoint has no tensor {names.tokens}.weight, which its family begins with")
        self.tokens = self._embedding(names.tokens, config.vocab_size)
        self.positions = self._embedding(names.positions, config.num_positions) if names.positions else None
        self.types = self._embedding(names.types, config.num_types) if names.types and config.num_types else None
        self.embedding_norm = self._norm(names.embedding_norm)
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.final_norm = self._norm(names.final_norm) if names.final_norm else None
        self.tables = {
            rotary: RotaryTable.of(rotary, config.max_model_len, torch.device("cpu"))
            for rotary in dict.fromkeys(config.rotaries)
            if rotary is not None
        }
        source.drop(f"{self.prefix}embeddings.position_ids")

    @property
    def scale(self) -> float:
        """Returns the factor of products of queries and keys."""
        return float(self.config.head_dim**-0.5)

    def embed(self, batch: TextBatch) -> Tensor:
        """Returns what the first layer reads, [tokens, hidden_size]."""
        hidden = F.embedding(batch.input_ids, self.tokens)
        if self.types is not None:
            hidden = hidden + F.embedding(batch.types.clamp(max=len(self.types) - 1), self.types)
        if self.positions is not None:
            hidden = hidden + F.embedding(batch.positions + self.config.first_position, self.positions)
        return self.embedding_norm(hidden.to(self.dtype))

    def forward(self, batch: TextBatch) -> Tensor:
        hidden = self.embed(batch)
        for layer in self.layers:
            if self.config.pre_norm:
                normed = hidden if layer.attention_norm is None else layer.attention_norm(hidden)
                hidden = hidden + self._attend(layer, normed, batch)
                hidden = hidden + layer.down(layer.up(layer.mlp_norm(hidden)))
            else:
                assert layer.attention_norm is not None
                hidden = layer.attention_norm(hidden + self._attend(layer, hidden, batch))
                hidden = layer.mlp_norm(hidden + layer.down(layer.up(hidden)))
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def _attend(self, layer: EncoderLayer, hidden: Tensor, batch: TextBatch) -> Tensor:
        heads, dim = self.config.num_heads, self.config.head_dim
        query_key, value = layer.qkv(hidden).view(len(hidden), 3 * heads, dim).tensor_split([2 * heads], dim=1)
        if layer.rotary is not None:
            query_key = rotate(query_key, self.tables[layer.rotary].at(batch.positions, hidden.dtype))
        query, key = query_key.chunk(2, dim=1)
        # Text by text: so none depends on how long the others are.
        parts = [_attended(query[span], key[span], value[span], layer.window, self.scale) for span in batch.spans]
        return layer.output(torch.cat(parts))

    # -- loading ----------------------------------------------------------------------------------------------------

    def _layer(self, index: int) -> EncoderLayer:
        config, names = self.config, self.config.names
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = 3 * hidden // len(names.qkv)
        parts = [self._weights(name.format(index), (rows, hidden), config.attention_bias) for name in names.qkv]
        biases = [bias for _, bias in parts if bias is not None]
        has_norm = not (config.pre_norm and index == 0)
        up: ActivatedLinear | GatedLinear
        if config.gated:
            up = GatedLinear(
                *self._weights(names.up.format(index), (2 * inner, hidden), config.mlp_bias), config.activation
            )
        else:
            up = ActivatedLinear(
                *self._weights(names.up.format(index), (inner, hidden), config.mlp_bias), config.activation
            )
        return EncoderLayer(
            qkv=Linear(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None),
            output=self.linear(names.attention_output.format(index), (hidden, hidden), config.attention_bias),
            attention_norm=self._norm(names.attention_norm.format(index)) if has_norm else None,
            up=up,
            down=self.linear(names.down.format(index), (hidden, inner), config.mlp_bias),
            mlp_norm=self._norm(names.mlp_norm.format(index)),
            window=config.windows[index],
            rotary=config.rotaries[index],
        )

    def linear(self, name: str, shape: tuple[int, int], has_bias: bool) -> Linear:
        """Takes a linear layer of the encoder."""
        return Linear(*self._weights(name, shape, has_bias))

    def _weights(self, name: str, shape: tuple[int, int], has_bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = self._source.take(f"{self.prefix}{name}.weight", shape).to(self.dtype)
        bias = self._source.take(f"{self.prefix}{name}.bias", shape[:1]).to(self.dtype) if has_bias else None
        return weight, bias

    def _embedding(self, name: str, rows: int) -> Tensor:
        shape = self._source.shapes().get(f"{self.prefix}{name}.weight")
        # A shorter context leaves positions unused.
        stored = max(rows, shape[0]) if shape else rows
        return self._source.take(f"{self.prefix}{name}.weight", (stored, self.config.hidden_size)).to(self.dtype)

    def _norm(self, name: str) -> LayerNorm:
        size = (self.config.hidden_size,)
        weight, bias = (self._norm_tensor(name, kind, size) for kind in ("weight", "bias"))
        assert weight is not None
        return LayerNorm(weight, bias if self.config.norm_bias else None, self.config.norm_eps)

    def _norm_tensor(self, name: str, kind: str, size: tuple[int]) -> Tensor | None:
        """Takes a norm's weight or bias, which old checkpoints call gamma and beta."""
        if kind == "bias" and not self.config.norm_bias:
            return None
        old = f"{self.prefix}{name}.{'gamma' if kind == 'weight' else 'beta'}"
        name = old if old in self._source.shapes() else f"{self.prefix}{name}.{kind}"
        return self._source.take(name, size).float().contiguous()


def _attended(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
    """Returns the attention of one text, [tokens, heads * head_dim], to both sides."""
    mask = None
    if window and len(query) > window:
        places = torch.arange(len(query))
        mask = (places[:, None] - places[None]).abs() < window
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return attended[0].transpose(0, 1).flatten(1)

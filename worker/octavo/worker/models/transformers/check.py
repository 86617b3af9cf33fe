"""The check, at start, of what a transformers model does around its attention: two short sequences, computed twice.

First they are a batch of two rows with positions and masks left to transformers, then as Octavo serves them: both in
one row, positions given, no mask. All inputs of attention must be the same, and no layer may ask for what paged
attention does not do. The layers' requests give the shape of the KV cache: configurations do not state it in any one
way.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.transformers.attention import (
    PAGED,
    MaskMarks,
    NotCausal,
    attending,
    current_pass,
    mark_masks,
    marking,
    paged_attention,
)
from octavo.worker.models.transformers.cut import CutModel
from octavo.worker.models.transformers.linear import QuantizedLinearModule, pack_linears

CHECKED = "octavo_checked"
_SEQUENCES, _TOKENS = 2, 8
_QUANTIZED_TOLERANCE = 0.02
# Arguments of an attention function that paged attention honours, and those that change nothing.
_HONOURED = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal"}
_WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache"}


class UnsupportedModel(ModelConfigError):
    """Raised for a model that Octavo's paged attention cannot serve, or not without changing its results."""


@dataclass(frozen=True, slots=True)
class PagedShape:
    """Holds the measured `octavo.worker.models.decoder.ModelSizes` of a model."""

    vocab_size: int
    max_model_len: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """Holds the inputs that one layer gave to attention: [tokens, heads, head_dim] each."""

    query: Tensor
    key: Tensor
    value: Tensor


class _Recorder:
    """Attends within each of the sequences, which have equally many tokens, and records the inputs."""

    def __init__(self, marks: MaskMarks) -> None:
        self.marks = marks
        self.calls: list[_Call] = []
        self.windows: list[int] = []

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.calls.append(_Call(query, key, value))
        heads, keys, values = (
            rows.view(_SEQUENCES, _TOKENS, *rows.shape[1:]).transpose(1, 2) for rows in (query, key, value)
        )
        attended = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)

    def note(self, module: nn.Module, mask: Tensor | None, arguments: dict[str, Any]) -> None:
        """Raises `UnsupportedModel` if a layer asks for what paged attention would not give it."""
        layer = len(self.windows)
        unknown = sorted(name for name, value in arguments.items() if _matters(name, value))
        if unknown:
            raise UnsupportedModel(f"layer {layer} gives its attention {', '.join(unknown)}, which is not implemented")
        try:
            window = _unmasked_window(module, arguments) if mask is None else self.marks.window_of(mask)
        except NotCausal as error:
            raise UnsupportedModel(f"layer {layer} {error}") from None
        named = arguments.get("sliding_window") or 0
        if named != window and 0 < named < self.marks.context:
            raise UnsupportedModel(f"layer {layer} names a window of {named} tokens, but masks for one of {window}")
        self.windows.append(window)


def _matters(name: str, value: object) -> bool:
    if name in _HONOURED or name in _WITHOUT_EFFECT or name.startswith("output_"):
        return False
    return not (value is None or (isinstance(value, int | float) and value == 0))


def _unmasked_window(module: nn.Module, arguments: dict[str, Any]) -> int:
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotCausal("attends both ways: this is no causal language model")
    return 0


def _checked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    recorder = current_pass().attending
    assert isinstance(recorder, _Recorder)
    recorder.note(module, attention_mask, arguments)
    return paged_attention(module, query, key, value, None, **arguments)


AttentionInterface.register(CHECKED, _checked_attention)
mark_masks(CHECKED)


def check(model: CutModel, context: int) -> PagedShape:
    """Returns the shape of `model`, whose context is `context` tokens.

    From then on the model attends as `PAGED` and its `LinearModule`s are packed. Raises `UnsupportedModel`.
    """
    try:
        return _check(model, context)
    except UnsupportedModel:
        raise
    except Exception as error:  # Whatever a model of transformers may raise, it must not be served.
        raise UnsupportedModel(f"its first forward pass fails: {type(error).__name__}: {error}") from error


def _check(model: CutModel, context: int) -> PagedShape:
    embedding = model.model.get_input_embeddings()
    token_ids = _token_ids(embedding.num_embeddings, embedding.weight.device)
    _as_batch(model, token_ids, context)
    # A packed layer rounds in its own way, and experts are chosen by a hair: both passes must round alike.
    pack_linears(model.model)
    batch, expected = _as_batch(model, token_ids, context)
    row, logits = _as_row(model, token_ids)
    tolerance = max(1e-3, 8 * torch.finfo(logits.dtype).eps)
    if any(isinstance(module, QuantizedLinearModule) for module in model.model.modules()):
        # Their inputs are quantised, where the last bit of a value may decide between two integers.
        tolerance = _QUANTIZED_TOLERANCE
    if not batch.calls:
        raise UnsupportedModel("its layers never call the attention that is plugged in")
    shape = _shape(batch, logits.shape[-1], context)
    _compare(batch.calls, row.calls, tolerance)
    if not _close(expected, logits, tolerance):
        raise UnsupportedModel("its logits do not follow from its decoder's hidden states alone")
    return shape


def _as_batch(model: CutModel, token_ids: Tensor, context: int) -> tuple[_Recorder, Tensor]:
    """Computes a batch with positions and masks left to transformers; logits are [tokens, vocab_size]."""
    model.model.set_attn_implementation(CHECKED)
    with marking(context) as marks, attending(recorder := _Recorder(marks)):
        return recorder, model.run(token_ids).flatten(0, 1)


def _as_row(model: CutModel, token_ids: Tensor) -> tuple[_Recorder, Tensor]:
    """Computes one row with given positions and no mask, as Octavo serves."""
    model.model.set_attn_implementation(PAGED)
    positions = torch.arange(_TOKENS, device=token_ids.device).repeat(_SEQUENCES)
    with attending(recorder := _Recorder(MaskMarks(_TOKENS))):
        return recorder, model.logits(model.decode(token_ids.flatten(), positions))


def _token_ids(vocab_size: int, device: torch.device) -> Tensor:
    """Returns distinct ids, [sequences, tokens], away from the ends of the vocabulary where special tokens are."""
    ids = vocab_size // 3 + 7 * torch.arange(_SEQUENCES * _TOKENS, device=device)
    return (ids % vocab_size).view(_SEQUENCES, _TOKENS)


def _compare(batch: list[_Call], row: list[_Call], tolerance: float) -> None:
    if len(row) != len(batch):
        raise UnsupportedModel(f"it calls attention {len(batch)} times or {len(row)} times in a pass")
    for layer, (expected, call) in enumerate(zip(batch, row, strict=True)):
        for name in ("query", "key", "value"):
            if not _close(getattr(expected, name), getattr(call, name), tolerance):
                raise UnsupportedModel(
                    f"the {name} of layer {layer} changes when sequences share a row: tokens reach each other outside"
                    " attention (by a recurrent state, a convolution), or positions are counted in a way of its own"
                )


def _close(expected: Tensor, actual: Tensor, tolerance: float) -> bool:
    """Tells whether two tensors are equal up to rounding, relative to the largest number."""
    if expected.shape != actual.shape:
        return False
    if not expected.numel():
        # Logits on any rank but the first.
        return True
    difference = (expected.float() - actual.float()).abs().max()
    return bool(difference <= tolerance * expected.float().abs().max())


def _shape(batch: _Recorder, vocab_size: int, context: int) -> PagedShape:
    heads = {(call.key.shape[1:], call.value.shape[1:]) for call in batch.calls}
    if len(heads) > 1:
        shapes = ", ".join(sorted(str(list(key)) for key, _ in heads))
        raise UnsupportedModel(f"its layers have keys of different shapes ([heads, head_dim]): {shapes}")
    [(key, value)] = heads
    if key != value:
        raise UnsupportedModel(f"its keys ([heads, head_dim] = {list(key)}) and values ({list(value)}) differ in shape")
    for layer, call in enumerate(batch.calls):
        if call.query.shape[1] % key[0] or call.query.shape[2] != key[1]:
            raise UnsupportedModel(
                f"queries of layer {layer}, {list(call.query.shape[1:])}, do not fit keys {list(key)}"
            )
    return PagedShape(vocab_size, context, key[0], key[1], tuple(batch.windows))

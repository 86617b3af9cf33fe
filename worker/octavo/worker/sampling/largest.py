"""The largest logits of each row without sorting it: first the parts of the row that can hold them, then those in
them."""

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeUnavailable, find
from octavo.kernels.native.likeliest import likeliest as native_likeliest

# Neighbours looked at together for the one largest.
_SPAN = 256


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of `logits` ([rows, vocab_size] fp32) and its id, [rows] each; of equal ones the lowest
    id. A NaN counts as the largest of all."""
    library = find()
    if logits.device.type == "cpu" and logits.is_contiguous() and not isinstance(library, NativeUnavailable):
        return native_likeliest(library, logits)
    size = logits.shape[1]
    span = _span_maxima(logits, _SPAN).argmax(dim=-1, keepdim=True)
    # Beyond the end the last one stands again: the first of equals is taken.
    tokens = (span * _SPAN + torch.arange(_SPAN, device=logits.device)).clamp_max_(size - 1)
    inside = logits.gather(1, tokens)
    token = tokens.gather(1, inside.argmax(dim=-1, keepdim=True))
    return logits.gather(1, token).squeeze(1), token.squeeze(1)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of `logits` ([rows, vocab_size] fp32) and their ids, [rows, count] each, in
    falling order, equal ones by rising id; all there are if they are fewer. Which of those that are -inf is open."""
    count = min(count, logits.shape[1])
    values, tokens = _top(*_pool(logits, count + 1), count + 1)
    if values.shape[1] > count:
        _settle_ties(logits, values, tokens)
        values, tokens = values[:, :count], tokens[:, :count]
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `largest` of any fp32 `values` ([rows, n]), without a glance at them on the host: what it does is the same
    whatever they are. It takes twice as much memory again; of those that are -inf the lowest ids come first."""
    keys = _ranking(values)
    count = min(count, values.shape[1])
    # Keys are distinct, so that which columns hold the largest, and which those are, is never open.
    found = _pool(keys, count)[0].topk(count, dim=-1).values
    tokens = values.shape[1] - 1 - (found & 0xFFFFFFFF)
    return values.gather(1, tokens), tokens


def _top(values: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found, places = values.topk(min(count, values.shape[1]), dim=-1)
    return found, tokens.gather(1, places)


def _pool(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row some logits that none left out is above the `count` largest of, and their ids, [rows, n] each.

    A row is read as columns of ids that are far apart; those with the `count` largest maxima have as many that are not
    below anything in the others. (Columns, because the maxima of many of them are found side by side.)
    """
    rows, size = logits.shape
    height = _height(size, count)
    width = size // height
    columns = logits[:, : height * width].view(rows, height, width)
    chosen = columns.amax(dim=1).topk(min(count, width), dim=-1, sorted=False).indices
    inside = chosen[:, None] + width * torch.arange(height, device=logits.device)[:, None]
    rest = torch.arange(height * width, size, device=logits.device).expand(rows, -1)
    tokens = torch.cat((inside.flatten(1), rest), dim=1)
    return logits.gather(1, tokens), tokens


def _height(size: int, count: int) -> int:
    """The power of two that makes about as many columns as there are ids in `count` of them."""
    height = 1
    while 4 * height * height * count <= size:
        height *= 2
    return height


def _settle_ties(logits: Tensor, values: Tensor, tokens: Tensor) -> None:
    """Where the last of `values` ([rows, n], the largest) equals the one before it, which of its equals belong to the
    n - 1 first is open: these rows of `tokens` become those with the lowest ids."""
    tied = ((values[:, -1] == values[:, -2]) & (values[:, -1] > -torch.inf)).nonzero().squeeze(1)
    if len(tied):
        tokens[tied] = _ranking(logits.index_select(0, tied)).topk(values.shape[1], dim=-1).indices


def _span_maxima(logits: Tensor, width: int) -> Tensor:
    """[rows, spans]: the largest of every `width` consecutive ids; the last span may be shorter."""
    rows, size = logits.shape
    whole = size // width * width
    maxima = logits[:, :whole].view(rows, size // width, width).amax(dim=-1)
    if whole == size:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=1)


def _ranking(values: Tensor) -> Tensor:
    """Distinct int64 keys that order fp32 `values` ([rows, n]) by size and equal ones by falling place.

    Above: the value's bits, whose integers order positive floats; those of negative ones are turned round. Below: the
    distance from the end. (A selection by value alone would leave open which of several equal ones it takes.)
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    size = values.shape[1]
    return (ordered.long() << 32) + torch.arange(size - 1, -1, -1, device=values.device)

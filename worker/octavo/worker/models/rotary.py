"""Rotary position embedding (Su et al., "RoFormer", 2021): its parameters in config.json, and its tables and rotation.

Pairs lie half a head apart, as in the Llama family.
"""

import decimal
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

import torch
from torch import Tensor

from octavo.kernels.native.memory import zeros
from octavo.worker.models.architectures import FULL, SLIDING, Architecture
from octavo.worker.models.config_file import ConfigFile, ModelConfigError, UnsupportedSetting

logger = logging.getLogger(__name__)


# Cosines and signed sines of a step's tokens, each [tokens, 1, rotary_dim], in the dtype of the heads.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Makes all waves `factor` times as long (Chen et al., "Extending Context Window", 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Makes long waves `factor` times as long and keeps short ones (Llama 3.1).

    Long waves turn less than `low_frequency_factor` times within the original context, short ones more than
    `high_frequency_factor` times.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolates by wavelength (Peng et al., "YaRN", 2023). With `truncate`, the bounds of the interpolation are
    whole dimensions."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Makes each wave longer by a factor of its own (Ding et al., "LongRoPE", 2024)."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """The rotary embedding of a layer: the first `rotary_dim` of a head turn, with base frequency `theta`.

    Cosines and sines are multiplied with `attention_factor`.
    """

    theta: float
    rotary_dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    attention_factor: float = 1.0


def rotary_config(
    file: ConfigFile, architecture: Architecture, layer_type: str, head_dim: int, context: int
) -> RotaryConfig:
    """Reads the rotary embedding of layers of `layer_type` where positions stay below `context`. Raises
    `ModelConfigError`."""
    parameters = _parameters(file, architecture, layer_type)
    try:
        rotary_dim = _rotary_dim(file, architecture, parameters, head_dim)
        scaling, attention_factor = _scaling(file, architecture, parameters, context)
        rotary = RotaryConfig(_theta(file, parameters, layer_type), rotary_dim, scaling, attention_factor)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelConfigError(f"the rotary embedding's parameters {parameters} are not usable: {error!r}") from error
    if isinstance(scaling, LongRopeScaling) and len(scaling.factors) != rotary_dim // 2:
        raise ModelConfigError(f"{len(scaling.factors)} longrope factors are given for {rotary_dim // 2} frequencies")
    return rotary


def _parameters(file: ConfigFile, architecture: Architecture, layer_type: str) -> dict[str, Any]:
    """Reads both layouts: `rope_scaling` with `rope_theta` beside it, and transformers 5's `rope_parameters` with all
    in one, which may be given by layer type."""
    parameters = file.rope_parameters or {}
    nested = any(key in parameters for key in (FULL, SLIDING))
    if not architecture.rotary_by_layer_type:
        if nested:
            raise UnsupportedSetting(f"rope_parameters by layer type are not implemented for {file.architectures}")
        return dict(file.rope_scaling or parameters)
    if not isinstance(parameters.get(layer_type, {}), dict):
        raise ModelConfigError(f"rope_parameters = {parameters} hold no parameters for {layer_type}")
    if parameters and not nested:
        raise UnsupportedSetting(
            f"rope_parameters = {parameters} are not by layer type, as {file.architectures} has it"
        )
    scaling = file.rope_scaling if layer_type == FULL else None
    return {**(parameters.get(layer_type) or {}), **(scaling or {})}


def _theta(file: ConfigFile, parameters: Mapping[str, Any], layer_type: str) -> float:
    local = file.rope_local_base_freq if layer_type == SLIDING else None
    beside = local or file.rope_theta or 10000.0
    given = parameters.get("rope_theta")
    theta = _positive(beside if given is None else given)
    if theta <= 1.0:
        raise ValueError(f"a base frequency of {theta} makes no waves of different lengths")
    return theta


def _rotary_dim(file: ConfigFile, architecture: Architecture, parameters: Mapping[str, Any], head_dim: int) -> int:
    beside = 1.0 if file.partial_rotary_factor is None else file.partial_rotary_factor
    factor = float(parameters.get("partial_rotary_factor", beside))
    if factor != 1.0 and not architecture.reads("partial_rotary_factor"):
        raise UnsupportedSetting(f"partial_rotary_factor = {factor} is not implemented for {file.architectures}")
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelConfigError(f"{rotary_dim} of a head's {head_dim} dimensions cannot turn in pairs")
    return rotary_dim


def _scaling(
    file: ConfigFile, architecture: Architecture, parameters: Mapping[str, Any], context: int
) -> tuple[LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None, float]:
    """Returns the scaling and the attention factor."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    given = parameters.get("original_max_position_embeddings", file.max_position_embeddings)
    original = file.original_max_position_embeddings or int(_positive(given))
    match architecture.rope_types.get(kind, kind):
        # Dynamic NTK stretches positions from max_position_embeddings on, and a context never reaches beyond these.
        case "default" | "dynamic":
            return None, 1.0
        case "linear":
            return LinearScaling(_positive(parameters["factor"])), 1.0
        case "llama3":
            return _llama3(parameters, original), 1.0
        case "yarn":
            return _yarn(parameters, original, file.max_position_embeddings / original)
        case "longrope":
            return _longrope(parameters, original, file.max_position_embeddings / original, context)
    raise UnsupportedSetting(
        f"rope_type = {kind!r} is not implemented; default, dynamic, linear, llama3, longrope and yarn are"
    )


def _llama3(parameters: Mapping[str, Any], original: int) -> Llama3Scaling:
    low, high = _positive(parameters["low_freq_factor"]), _positive(parameters["high_freq_factor"])
    if low >= high:
        raise ValueError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(_positive(parameters["factor"]), low, high, original)


def _yarn(parameters: Mapping[str, Any], original: int, stretch: float) -> tuple[YarnScaling, float]:
    given = parameters["factor"]
    factor = _positive(stretch if given is None else given)
    scaling = YarnScaling(
        factor,
        original,
        _positive(parameters.get("beta_fast") or 32.0),
        _positive(parameters.get("beta_slow") or 1.0),
        bool(parameters.get("truncate", True)),
    )
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        return scaling, float(attention_factor)
    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if numerator and denominator:
        return scaling, _magnitude(factor, numerator) / _magnitude(factor, denominator)
    return scaling, _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    """Computes equation 22 of the YaRN paper, as DeepSeek extended it by `scale`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(
    parameters: Mapping[str, Any], original: int, stretch: float, context: int
) -> tuple[LongRopeScaling, float]:
    """Returns the longrope scaling and its attention factor.

    The short factors are for sequences within the original context, the long ones for longer sequences. Cached keys
    turn once and for all, so the longest possible sequence decides for every sequence.
    """
    key = "long_factor" if context > original else "short_factor"
    if context > original:
        logger.warning(
            "the long factors of longrope are used for all sequences, as the context is %d tokens; if all stay within"
            " %d, --max-model-len %d makes the shorter ones better",
            context,
            original,
            original,
        )
    scaling = LongRopeScaling(tuple(_positive(factor) for factor in parameters[key]))
    given, attention_factor = parameters.get("factor"), parameters.get("attention_factor")
    factor = stretch if given is None else float(given)
    if attention_factor is not None:
        return scaling, float(attention_factor)
    return scaling, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def _positive(value: Any) -> float:
    number = float(value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"{value!r} is not a positive number")
    return number


# The rows that are computed at a time, always the same ones: a row's bits do not depend on what was asked for before.
_ROWS_AT_ONCE = 1024


@dataclass(eq=False, slots=True)
class RotaryTable:
    """Holds cosines and sines of every position, each [max_position, rotary_dim / 2] fp32, times the attention factor.

    On a CPU, rows are computed when a step first reaches their positions, and take no memory before: a context may be
    far longer than any request. The first `num_rows` are there.
    """

    cos: Tensor
    sin: Tensor
    num_rows: int
    _frequencies: Tensor
    _attention_factor: float
    _exact: bool

    @classmethod
    def of(cls, config: RotaryConfig, max_position: int, device: torch.device, *, exact: bool = False) -> Self:
        """Makes the table, with the first rows on a CPU and with all on another device.

        With `exact`, every CPU computes the same bits: torch's powers, cosines and sines differ from one instruction
        set to the next. Raises `OSError` or `RuntimeError` if there is no room.
        """
        frequencies = inverse_frequencies(config, exact=exact)
        shape = (max_position, len(frequencies))
        cos, sin = (
            zeros(shape, torch.float32) if device.type == "cpu" else torch.empty(shape, device=device) for _ in range(2)
        )
        table = cls(cos, sin, 0, frequencies, config.attention_factor, exact)
        table.reach(0 if device.type == "cpu" else max_position - 1)
        return table

    def reach(self, position: int) -> None:
        """Computes the rows that are missing up to that of `position`, or to the last."""
        while self.num_rows <= min(position, len(self.cos) - 1):
            rows = slice(self.num_rows, min(self.num_rows + _ROWS_AT_ONCE, len(self.cos)))
            angles = torch.outer(torch.arange(rows.start, rows.stop, dtype=torch.float32), self._frequencies)
            cos, sin = _turn(angles) if self._exact else (angles.cos(), angles.sin_())
            self.cos[rows] = cos.mul_(self._attention_factor)
            self.sin[rows] = sin.mul_(self._attention_factor)
            self.num_rows = rows.stop

    def at(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Returns the angles of `positions` ([tokens], at least one), for `rotate`."""
        if self.num_rows < len(self.cos):
            self.reach(int(positions.max()))
        cos, sin = (table.index_select(0, positions).unsqueeze(1).to(dtype) for table in (self.cos, self.sin))
        # The minus sign of rotating by 90 degrees is folded in.
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turns the first rotary_dim of each of `heads` ([tokens, heads, head_dim]) by the `angles` of their positions."""
    cos, signed_sin = angles
    turning, fixed = heads.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = torch.addcmul(turning * cos, torch.cat((second, first), dim=-1), signed_sin)
    return torch.cat((turned, fixed), dim=-1) if fixed.shape[-1] else turned


def halves_first(turning_heads: int, other_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Returns the order of rows that turns heads with neighbouring pairs into heads that `rotate` takes.

    The result is [(turning_heads + other_heads) * head_dim] int64. Products of queries and keys do not change if both
    are put in this order.
    """
    rows = torch.arange((turning_heads + other_heads) * head_dim).view(-1, head_dim)
    turning = rows[:turning_heads, :rotary_dim]
    turning.copy_(torch.cat((turning[:, ::2], turning[:, 1::2]), dim=1))
    return rows.flatten()


# A quarter of a turn in parts of 33 bits, so that their products with numbers of up to 20 are exact.
_QUARTER = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487111665e-21)
# The series of sin(r) / r and cos(r) in r squared; for r up to pi / 4 what is left out is below a double's last bit.
_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(9))
_COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(10))


def _turn(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of `angles` (fp32, not negative, below a million), in operations that every CPU
    rounds alike: products, sums and what is the nearest whole number, one by one."""
    whole = angles.double()
    quarters = (whole * (2 / math.pi)).round()
    rest = whole
    for part in _QUARTER:
        rest = rest - quarters * part
    square = rest * rest
    sine, cosine = torch.full_like(rest, _SINE[-1]), torch.full_like(rest, _COSINE[-1])
    for factor in reversed(_SINE[:-1]):
        sine = sine * square + factor
    for factor in reversed(_COSINE[:-1]):
        cosine = cosine * square + factor
    sine = sine * rest
    turned, opposite = (quarters % 2).bool(), (quarters % 4 >= 2).bool()
    cos = torch.where(turned, -sine, cosine)
    sin = torch.where(turned, cosine, sine)
    return torch.where(opposite, -cos, cos).float(), torch.where(opposite, -sin, sin).float()


def _powers(base: float, exponents: Tensor) -> Tensor:
    """Returns base^exponents ([n] fp32), each the nearest fp32: decimal arithmetic is the same on every CPU."""
    with decimal.localcontext(prec=40):
        powers = [float(Decimal(base) ** Decimal(exponent)) for exponent in exponents.tolist()]
    return torch.tensor(powers, dtype=torch.float32)


def inverse_frequencies(config: RotaryConfig, *, exact: bool = False) -> Tensor:
    """Returns theta^(-2i/d), scaled as `config.scaling` says, [rotary_dim / 2] fp32; `exact` as in `RotaryTable.of`."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    wavelengths = _powers(config.theta, exponents) if exact else config.theta**exponents
    match config.scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor):
            return 1.0 / wavelengths / factor
        case LongRopeScaling(factors):
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
        case Llama3Scaling() as llama3:
            return _stretched(1.0 / wavelengths, llama3.factor, _llama3_kept(1.0 / wavelengths, llama3))
        case YarnScaling() as yarn:
            return _stretched(1.0 / wavelengths, yarn.factor, _yarn_kept(config, yarn))


def _stretched(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Interpolates between `frequencies` / `factor` (where `kept` is 0) and `frequencies` (where it is 1)."""
    return frequencies / factor * (1.0 - kept) + frequencies * kept


def _llama3_kept(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Returns how far frequencies are kept in Llama 3.1: long waves are stretched, short ones kept, those between
    interpolated."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    return ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)


def _yarn_kept(config: RotaryConfig, scaling: YarnScaling) -> Tensor:
    """Returns how far frequencies are kept (Peng et al., "YaRN", 2023).

    Dimensions that turn more than `beta_fast` times within the original context are kept, those that turn less than
    `beta_slow` times stretched, those between interpolated.
    """

    def dimension(turns: float) -> float:
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    # A width of zero would divide by it.
    width = (high - low) or 0.001
    ramp = (torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / width
    return 1.0 - ramp.clamp(0.0, 1.0)

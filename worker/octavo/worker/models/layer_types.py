"""Which layers attend to a sliding window, and which know positions."""

from octavo.worker.models.architectures import FULL, SLIDING, Architecture
from octavo.worker.models.config_file import ConfigFile
from octavo.worker.models.errors import ConfigError, UnsupportedSetting


def layer_types(file: ConfigFile, architecture: Architecture) -> list[str]:
    """`FULL` or `SLIDING` for each layer, as transformers derives it where config.json does not say."""
    types = file.layer_types if architecture.reads("layer_types") else None
    types = _derived(file, architecture) if types is None else types
    possible = {FULL} if _window(file) is None else {FULL, SLIDING}
    if file.layer_types not in (None, types) or len(types) != file.num_hidden_layers or not set(types) <= possible:
        raise UnsupportedSetting(
            f"layer_types = {file.layer_types or types!r} is not implemented for {file.num_hidden_layers} layers with"
            f" {'no' if _window(file) is None else 'a'} sliding window in force"
        )
    return types


def windows(file: ConfigFile, architecture: Architecture, types: list[str], context: int) -> tuple[int, ...]:
    """How many tokens each layer of `types` attends to; 0: all. A window that takes in the whole context is none."""
    window = _window(file)
    if window is None or window >= context:
        window = 0
    elif architecture.layer_pattern == "none":
        raise UnsupportedSetting(
            f"sliding_window = {window} is not implemented for {file.architectures};"
            f" with --max-model-len {window} it makes no difference"
        )
    return tuple(window if layer_type == SLIDING else 0 for layer_type in types)


def rotated(file: ConfigFile, architecture: Architecture, types: list[str]) -> list[bool]:
    """Whether each layer of `types` knows positions."""
    if architecture.full_layers_unrotated and file.sliding_window is not None:
        return [layer_type == SLIDING for layer_type in types]
    return _rotated(file)


def _window(file: ConfigFile) -> int | None:
    """The window of the layers that slide; None if none does."""
    window = file.sliding_window if file.use_sliding_window else None
    if window is not None and window < 1:
        raise ConfigError(f"sliding_window = {window} leaves a token nothing to attend to")
    return window


def _derived(file: ConfigFile, architecture: Architecture) -> list[str]:
    return [SLIDING if slides else FULL for slides in _slides(file, architecture)]


def _slides(file: ConfigFile, architecture: Architecture) -> list[bool]:
    layers = range(file.num_hidden_layers)
    match architecture.layer_pattern:
        case "none":
            return [False for _ in layers]
        case "all":
            return [_window(file) is not None for _ in layers]
        case "every other":
            return [layer % 2 == 0 for layer in layers]
        case "from max_window_layers":
            return [_window(file) is not None and layer >= file.max_window_layers for layer in layers]
        case "all but nth":
            return [(layer + 1) % _pattern(file) != 0 for layer in layers]
        case "all but first of four":
            return [layer % 4 != 0 for layer in layers]
        case "unrotated":
            return [_window(file) is not None and not turns for turns in _rotated(file)]


def _rotated(file: ConfigFile) -> list[bool]:
    layers = range(file.num_hidden_layers)
    if file.no_rope_layers is not None:
        if len(file.no_rope_layers) != len(layers):
            raise ConfigError(f"no_rope_layers has {len(file.no_rope_layers)} entries for {len(layers)} layers")
        return [bool(turns) for turns in file.no_rope_layers]
    if file.no_rope_layer_interval is None:
        return [True for _ in layers]
    return [(layer + 1) % file.no_rope_layer_interval != 0 for layer in layers]


def _pattern(file: ConfigFile) -> int:
    pattern = file.sliding_window_pattern
    if not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedSetting(f"sliding_window_pattern = {pattern!r} is not implemented; a number of layers is")
    return pattern

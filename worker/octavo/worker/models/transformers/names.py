"""The names of checkpoints: the parameter of a transformers model that each tensor becomes. Names have changed over the
years."""

from enum import Enum
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)


class Layout(Enum):
    """Tells how a tensor lies in its parameter: as all of it; as one of several that are stacked, as experts are;
    otherwise."""

    SAME = "same"
    STACKED = "stacked"
    OTHER = "other"


class StoredNames:
    """Maps the names of checkpoints to the parameters of `model`, which needs no values."""

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._parameters = model.state_dict()

    def parameter(self, stored: str) -> tuple[str, Layout]:
        """Returns the name of the parameter, or one that no parameter has, and the layout in it of the tensor called
        `stored`."""
        name, pattern = self._renamed(stored, self._renamings, self._converters)
        if name not in self._parameters and stored in self._parameters:
            name, pattern = self._renamed(stored, [], [])
        return name, Layout.SAME if pattern is None else self._layout(pattern)

    def _layout(self, pattern: str) -> Layout:
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        stacking = all(isinstance(each, MergeModulelist | Concatenate) for each in converter.operations)
        return Layout.STACKED if stacking else Layout.OTHER

    def _renamed(self, stored: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        renamed: tuple[str, str | None] = rename_source_key(
            stored, renamings, converters, self._prefix, self._parameters
        )
        return renamed

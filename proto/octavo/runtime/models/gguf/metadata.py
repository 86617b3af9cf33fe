"""Asks a GGUF file's metadata for values of a kind: what is missing or of another kind is one clear error."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.runtime.models.gguf.file import GGUFError

# What positions and token ids can count to.
_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Metadata:
    """Holds the `values` of the file at `path`. `{arch}.` before a key stands for the name of its architecture."""

    path: Path
    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def has(self, key: str) -> bool:
        return self._full(key) in self.values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._unfit(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._unfit(key, value, "true or false")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Returns a whole number from `least` on. Where the file has one for each layer, they must be the same."""
        value = self._value(key, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self._unfit(key, value, f"a whole number of at least {least}, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0: the shortest decimal that is the same in fp32, as configurations have it."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._unfit(key, value, "a number above 0")
        return _shortest(value)

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self._unfit(key, type(value).__name__, "an array of texts")
        return value

    def numbers(self, key: str, length: int) -> Sequence[float]:
        """Returns an array of `length` numbers."""
        value = self._value(key, None)
        if not isinstance(value, array) or len(value) != length:
            found = len(value) if isinstance(value, array) else value
            raise self._unfit(key, found, f"an array of {length} numbers")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(self._full(key), default)
        if value is None:
            raise GGUFError(
                f"{self.path} has no metadata {self._full(key)!r}, without which its model cannot be served; convert"
                " the model again, or take another file of it"
            )
        return value

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key.removeprefix('{arch}.')}" if key.startswith("{arch}.") else key

    def _unfit(self, key: str, value: Any, wanted: str) -> GGUFError:
        shown = repr(value)
        return GGUFError(
            f"{self.path}: metadata {self._full(key)!r} is {shown[:80]}, and should be {wanted}; convert the model"
            " again, or take another file of it"
        )


def _shortest(value: float) -> float:
    """Returns 1e-05 where fp32 made it 9.999999747378752e-06."""
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if array("f", [rounded]) == array("f", [value]):
            return rounded
    return value

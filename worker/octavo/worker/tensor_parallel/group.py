"""What the parts of a model ask of the ranks that share it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # A group of one is named by what starts without it.
    from torch import Tensor


class ShardGroup(Protocol):
    """The ranks 0 to `size` - 1 that compute one model together; this process is `rank`.

    Every call is a collective: all ranks make the same calls in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """The sum over ranks, in the place of `tensor` (contiguous, of one shape on all ranks): the same bits on all of
        them. On a CPU an element's terms are added in the order of the ranks, whatever lies around it."""

    def gather_columns(self, part: "Tensor", sizes: Sequence[int]) -> "Tensor | None":
        """On rank 0 [rows, sum(sizes)] of each rank's `part` ([rows, sizes[rank]]); None on the others."""

    def exchange(self, number: int) -> list[int]:
        """What each rank gave, in their order."""


class SingleRank:
    """A group of one: nothing to wait for."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        return tensor

    def gather_columns(self, part: "Tensor", sizes: Sequence[int]) -> "Tensor | None":
        return part

    def exchange(self, number: int) -> list[int]:
        return [number]


SINGLE = SingleRank()

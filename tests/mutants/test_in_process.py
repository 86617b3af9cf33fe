"""A mutant planted in modules that are imported is there while the patch lasts; none is planted in silence."""

import msgspec
import pytest

from octavo.scheduler.kv.blocks import BlockPool

from .catalogue import CatalogueError, load
from .in_process import plant

MUTANTS = {mutant.name: mutant for mutant in load()}
SHARED = MUTANTS["share-not-counted"]


def shared_count() -> int:
    """References to a block that has been taken and shared once."""
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.share([block_id])
    return pool.ref_count(block_id)


def test_a_mutant_is_there_while_the_patch_lasts() -> None:
    assert shared_count() == 2
    with pytest.MonkeyPatch.context() as patch:
        plant(SHARED, patch)
        assert shared_count() == 1
    assert shared_count() == 2


def test_what_fits_no_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CatalogueError, match="is gone"):
        plant(msgspec.structs.replace(SHARED, old="no such text"), monkeypatch)


def test_what_changes_no_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment is no bug."""
    unchanged = msgspec.structs.replace(SHARED, new=SHARED.old + "  # As before.")
    with pytest.raises(CatalogueError, match="changes no function"):
        plant(unchanged, monkeypatch)

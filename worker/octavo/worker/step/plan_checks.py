"""Checks of the block ids in a plan: an id out of range would name a neighbour's memory instead of raising."""

from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockContent, BlockMove, BlockMoves, DiskMoves


class PlanError(Exception):
    """Raised for a plan that contradicts the state of the worker; nothing of the plan may run."""


def check_moves(moves: BlockMoves, *, num_blocks: int, num_cpu_blocks: int) -> None:
    """Checks the moves of a plan. Raises `PlanError` on moves of missing blocks, or that would undo one another."""
    filled = {move.target for move in moves.swap_out} & {move.source for move in moves.swap_in}
    if filled:
        raise PlanError(f"a plan fills CPU blocks {sorted(filled)} before it reads them")
    _check_kind("swap_out", moves.swap_out, num_blocks, num_cpu_blocks)
    _check_kind("swap_in", moves.swap_in, num_cpu_blocks, num_blocks)
    _check_kind("copy", moves.copy, num_blocks, num_blocks)


def _check_kind(kind: str, moves: list[BlockMove], num_sources: int, num_targets: int) -> None:
    for move in moves:
        if not (0 <= move.source < num_sources and 0 <= move.target < num_targets):
            raise PlanError(
                f"{kind} moves block {move.source} to {move.target}; there are {num_sources} to move from and"
                f" {num_targets} to move to"
            )
    if len({move.target for move in moves}) != len(moves):
        raise PlanError(f"{kind} moves two blocks to one")


def check_disk(disk: DiskMoves, moves: BlockMoves, *, num_blocks: int, num_cpu_blocks: int, num_groups: int) -> None:
    """Checks what a plan with these `moves` has the disk do. Raises `PlanError` on missing blocks and KV groups, and on
    a CPU block that is fetched into twice, or that the plan moves as well."""
    _check_contents("stores", disk.store, num_blocks, num_groups)
    _check_contents("fetches into", disk.fetch, num_cpu_blocks, num_groups)
    fetched = {content.block_id for content in disk.fetch}
    if len(fetched) != len(disk.fetch):
        raise PlanError("a plan fetches two blocks into one")
    moved = {move.target for move in moves.swap_out} | {move.source for move in moves.swap_in}
    if fetched & moved:
        raise PlanError(f"a plan fetches into CPU blocks {sorted(fetched & moved)} that it moves")


def _check_contents(kind: str, contents: list[BlockContent], num_blocks: int, num_groups: int) -> None:
    for content in contents:
        if content.block_id >= num_blocks or content.kv_group >= num_groups:
            raise PlanError(
                f"a plan {kind} block {content.block_id} of KV group {content.kv_group}; there are {num_blocks} blocks"
                f" and {num_groups} groups"
            )


def check_block_ids(block_ids: list[int], num_blocks: int, window: int, name: str) -> None:
    """Checks that all `block_ids` may stand in the table of a KV group with `window`.

    Raises `PlanError`, naming the sequence `name`, if one may not.
    """
    if not block_ids:
        return
    lowest, highest = min(block_ids), max(block_ids)
    if highest >= num_blocks or lowest < NULL_BLOCK:
        raise PlanError(f"{name} is given blocks {lowest} to {highest}; there are {num_blocks}")
    if lowest == NULL_BLOCK and not window:
        raise PlanError(f"{name} is given no block where its KV group sees all tokens")


def check_distinct(tables: list[list[int]], name: str) -> None:
    """Checks that no two entries of a sequence's tables name one block. Raises `PlanError` if two do."""
    num_held = sum(len(table) - table.count(NULL_BLOCK) for table in tables)
    if len(set[int]().union(*tables) - {NULL_BLOCK}) != num_held:
        raise PlanError(f"{name} holds a block twice")

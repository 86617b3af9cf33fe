"""`octavo cache list` and `reset`: the tiers of all workers' prefix caches, as the scheduler knows them."""

import json
from collections.abc import Iterable
from typing import Any

import click

from octavo.scheduler.cli.admin_client import TIMEOUT_S, admin_address_option, admin_stub
from octavo.scheduler.cli.tables import terminal_width, text_table
from octavo.v1 import admin_pb2 as pb

_HEAD = "WORKER TIER BLOCKS ROOM USED HITS TOKENS EVICTED MISSED MOVED PLACE"
# Columns that a narrow terminal leaves out, from the first on.
_DISPENSABLE = "PLACE MISSED MOVED EVICTED HITS"
_TOTAL = "(all)"
# What is the sum over workers; blocks that several workers share count once.
_COUNTS = ("hits", "hit_tokens", "evicted_blocks", "missed_blocks")

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command("list")
@_json_option
@admin_address_option
def list_tiers(as_json: bool, admin_address: str) -> None:
    """List the tiers of every worker's prefix cache, and all of them together.

    BLOCKS hold what requests find, where there is ROOM for so many. HITS are requests that found some of their
    beginnings there since the worker registered, TOKENS those of these beginnings. The content of EVICTED blocks made
    way; MISSED ones were asked for in vain. A terminal shows the columns that it has room for; a pipe gets all of them.
    """
    with admin_stub(admin_address) as stub:
        load = stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
    told = {worker.id: [_told(tier) for tier in worker.tiers] for worker in load.workers}
    totals = _totals(tier for tiers in told.values() for tier in tiers)
    if as_json:
        workers = [{"id": name, "tiers": tiers} for name, tiers in told.items()]
        click.echo(json.dumps({"workers": workers, "totals": totals}, indent=2))
        return
    rows = [_row(name, tier) for name, tiers in [*told.items(), (_TOTAL, totals)] for tier in tiers]
    click.echo(text_table(_HEAD, rows, width=terminal_width(), dispensable=_DISPENSABLE))


def _told(tier: pb.CacheTier) -> dict[str, Any]:
    return {
        "tier": _name(tier.tier),
        "blocks": tier.blocks,
        "capacity": tier.capacity,
        **{count: getattr(tier, count) for count in _COUNTS},
        "moved": {_name(move.to): move.blocks for move in tier.moves},
        "place": tier.place,
    }


def _name(tier: pb.Tier) -> str:
    return pb.Tier.Name(tier).removeprefix("TIER_").lower()


def _totals(tiers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds tiers of the same kind up. Those of one place are the same blocks, as far as each worker knows of them."""
    totals: dict[str, dict[str, Any]] = {}
    shared: dict[tuple[str, str], int] = {}
    for tier in tiers:
        name, place = tier["tier"], tier["place"]
        total = totals.setdefault(
            name, {"tier": name, "blocks": 0, "capacity": 0, **dict.fromkeys(_COUNTS, 0), "moved": {}, "place": ""}
        )
        for size in ("blocks", "capacity"):
            known = shared.get((place, size), 0) if place else 0
            total[size] += max(0, tier[size] - known)
            shared[place, size] = max(known, tier[size])
        for count in _COUNTS:
            total[count] += tier[count]
        for target, blocks in tier["moved"].items():
            total["moved"][target] = total["moved"].get(target, 0) + blocks
    return list(totals.values())


def _row(worker: str, tier: dict[str, Any]) -> list[object]:
    blocks, capacity = tier["blocks"], tier["capacity"]
    return [
        worker,
        tier["tier"],
        blocks,
        capacity,
        f"{blocks / capacity:.0%}" if capacity else "-",
        *(tier[count] for count in _COUNTS),
        ", ".join(f"{count} to {target}" for target, count in tier["moved"].items()) or "-",
        tier["place"] or "-",
    ]


@click.command()
@click.option("--salt", help="Only what is behind this cache salt. Default: all.")
@_json_option
@admin_address_option
def reset(salt: str | None, as_json: bool, admin_address: str) -> None:
    """Let no later request find what is cached now, in any tier of any worker.

    Running requests go on as they are. Pinned prefixes are computed anew, unless a salt is given. Disks, which cannot
    tell what is behind a salt, are cleared in either case.
    """
    with admin_stub(admin_address) as stub:
        answer = stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(salt=salt), timeout=TIMEOUT_S)
    if as_json:
        fields = ("dropped_blocks", "blocks_in_use", "pinned_prefixes")
        click.echo(json.dumps({field: getattr(answer, field) for field in fields}, indent=2))
        return
    click.echo(f"dropped {answer.dropped_blocks} cached blocks, {answer.blocks_in_use} of them still in use")
    if answer.pinned_prefixes:
        click.echo(f"pinned prefixes that are computed anew: {answer.pinned_prefixes}")

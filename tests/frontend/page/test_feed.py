"""Snapshots of the scheduler's blocks as the page reads them."""

from base64 import b64decode

import msgspec
import pytest

from octavo.frontend.errors import Reason, Unavailable
from octavo.frontend.page import live_view
from octavo.frontend.page.live_view import snapshots, to_snapshot
from octavo.testing.fakes.fake_admin import FakeAdmin
from octavo.v1 import admin_pb2 as pb


def test_a_snapshot_has_the_load_the_blocks_and_the_requests() -> None:
    request = pb.RequestStatus(
        request_id="a",
        frontend_id="00f0",
        tenant="alice",
        state=pb.REQUEST_STATE_SWAPPED,
        worker_id="w0",
        moves_to="w1",
        prompt_tokens=5,
        computed_tokens=6,
        output_tokens=2,
        sequences=3,
        preemptions=2,
        swaps=1,
    )
    request.age.FromMilliseconds(1500)
    answer = pb.WatchBlocksResponse(
        load=pb.GetLoadResponse(
            waiting=1,
            running=2,
            swapped=3,
            preemptions=4,
            frontends=5,
            workers=[
                pb.Worker(
                    id="w0",
                    device="cpu",
                    token_rate=12.5,
                    tokens_sampled=7,
                    block_size=16,
                    moved_in=6,
                    tiers=[
                        pb.CacheTier(
                            tier=pb.TIER_DISK,
                            blocks=1,
                            capacity=8,
                            hits=2,
                            hit_tokens=32,
                            evicted_blocks=3,
                            missed_blocks=4,
                            moves=[pb.TierMoves(to=pb.TIER_CPU, blocks=5)],
                            place="host:/kv",
                        )
                    ],
                )
            ],
        ),
        workers=[
            pb.WorkerBlocks(
                worker_id="w0",
                states=bytes([pb.BLOCK_STATE_FREE, pb.BLOCK_STATE_PINNED]),
                cpu_states=bytes([pb.BLOCK_STATE_SWAPPED]),
                owners=[
                    pb.BlockOwner(prefix_name="system", block_ids=[1]),
                    pb.BlockOwner(request_id="a", cpu_block_ids=[0]),
                ],
            )
        ],
        requests=[request],
    )
    assert to_snapshot(answer) == {
        "load": {
            "waiting": 1,
            "running": 2,
            "swapped": 3,
            "preemptions": 4,
            "moved": 6,
            "frontends": 5,
            "workers": ["w0"],
        },
        "workers": [
            {
                "id": "w0",
                "device": "cpu",
                "token_rate": 12.5,
                "tokens_sampled": 7,
                "block_size": 16,
                "moved_in": 6,
                "tiers": [
                    {
                        "tier": "disk",
                        "blocks": 1,
                        "capacity": 8,
                        "hits": 2,
                        "hit_tokens": 32,
                        "evicted_blocks": 3,
                        "missed_blocks": 4,
                        "moved": {"cpu": 5},
                        "place": "host:/kv",
                    }
                ],
                "states": "AQU=",
                "cpu_states": "Bw==",
                "owners": [
                    {"request_id": "", "prefix_name": "system", "block_ids": [1], "cpu_block_ids": []},
                    {"request_id": "a", "prefix_name": "", "block_ids": [], "cpu_block_ids": [0]},
                ],
            }
        ],
        "requests": [
            {
                "request_id": "a",
                "frontend_id": "00f0",
                "state": "swapped",
                "tenant": "alice",
                "worker_id": "w0",
                "moves_to": "w1",
                "prompt_tokens": 5,
                "computed_tokens": 6,
                "output_tokens": 2,
                "sequences": 3,
                "preemptions": 2,
                "swaps": 1,
                "age_s": 1.5,
            }
        ],
    }


def test_blocks_of_a_worker_that_the_load_does_not_tell_of() -> None:
    answer = pb.WatchBlocksResponse(workers=[pb.WorkerBlocks(worker_id="w1", states=bytes(2))])
    [worker] = to_snapshot(answer)["workers"]
    assert (worker["device"], worker["token_rate"], b64decode(worker["states"])) == ("", 0.0, bytes(2))


async def test_snapshots_are_json(admin: FakeAdmin) -> None:
    admin.put(waiting=3)
    stream = snapshots(admin.address)
    assert msgspec.json.decode(await anext(stream))["load"]["waiting"] == 3
    await stream.aclose()


async def test_each_snapshot_has_what_the_frontend_adds_at_its_time(admin: FakeAdmin) -> None:
    admin.put(waiting=3)
    admin.put(waiting=4)
    told = iter([{"at_s": 1.0}, {"at_s": 2.0}])
    stream = snapshots(admin.address, lambda: next(told))
    found = [msgspec.json.decode(await anext(stream)) for _ in range(2)]
    assert [(each["load"]["waiting"], each["at_s"]) for each in found] == [(3, 1.0), (4, 2.0)]
    await stream.aclose()


async def test_a_pool_of_a_million_blocks(admin: FakeAdmin) -> None:
    blocks = pb.WorkerBlocks(worker_id="w0", states=bytes([3]) * 1_000_000)
    blocks.owners.append(pb.BlockOwner(request_id="a", block_ids=range(1_000_000)))
    admin.answers.put_nowait(pb.WatchBlocksResponse(workers=[blocks]))
    stream = snapshots(admin.address)
    [worker] = msgspec.json.decode(await anext(stream))["workers"]
    assert len(worker["owners"][0]["block_ids"]) == 1_000_000
    await stream.aclose()


async def test_a_scheduler_that_goes_away_is_told_of(admin: FakeAdmin) -> None:
    admin.put(waiting=3)
    admin.answers.put_nowait(None)
    stream = snapshots(admin.address)
    await anext(stream)
    with pytest.raises(Unavailable) as caught:
        await anext(stream)
    assert caught.value.reason is Reason.SCHEDULER_UNREACHABLE


async def test_a_scheduler_that_is_not_there_is_told_of() -> None:
    with pytest.raises(Unavailable):
        await anext(snapshots("unix:/nowhere/admin.sock"))


async def test_a_scheduler_that_says_nothing_is_told_of(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_SILENCE_S", 0.1)
    with pytest.raises(Unavailable):
        await anext(snapshots(admin.address))

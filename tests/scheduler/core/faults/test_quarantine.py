"""What is refused for a while, by what it asks and not by its name."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.events import QuarantineCleared
from octavo.scheduler.core.faults import poison as quarantine_module
from octavo.scheduler.core.faults.poison import Quarantine
from octavo.testing.cluster import Cluster, make_request, resubmitted
from octavo.testing.poison import Poison
from octavo.wire.requests import RejectReason, Request

from ...conftest import MakeCluster

POISON = make_request("poison", 8, 20, temperature=1.0, seed=3)
WHY = "workers have died over it"


def changed(**changes: Any) -> Request:
    return msgspec.structs.replace(POISON, **changes)


def test_the_same_payload_is_refused_until_its_time_is_over() -> None:
    quarantine = Quarantine(600.0)
    assert quarantine.refusal(POISON, 0.0) is None
    quarantine.add(POISON, 10.0, WHY)
    assert "for another 600 s" in (quarantine.refusal(POISON, 10.0) or "")
    assert "for another 1 s" in (quarantine.refusal(POISON, 609.5) or "")
    assert quarantine.refusal(POISON, 610.0) is None
    assert len(quarantine) == 0


def sampled(**changes: Any) -> Request:
    return changed(sampling=msgspec.structs.replace(POISON.sampling, **changes))


@pytest.mark.parametrize(
    "request_",
    [changed(request_id="other"), changed(tenant="other", priority=3), resubmitted(POISON, [1, 2]), sampled(seed=99)],
    ids=["name", "tenant", "resubmitted", "seed"],
)
def test_the_same_payload_is_refused_whoever_asks(request_: Request) -> None:
    quarantine = Quarantine(600.0)
    quarantine.add(POISON, 0.0, WHY)
    assert quarantine.refusal(request_, 1.0)


@pytest.mark.parametrize(
    "request_",
    [changed(prompt_token_ids=[*POISON.prompt_token_ids, 1]), sampled(max_tokens=19), sampled(temperature=0.5)],
    ids=["prompt", "length", "temperature"],
)
def test_another_payload_is_taken(request_: Request) -> None:
    quarantine = Quarantine(600.0)
    quarantine.add(POISON, 0.0, WHY)
    assert quarantine.refusal(request_, 1.0) is None


def test_a_payload_that_comes_in_again_stays_from_then_on() -> None:
    quarantine = Quarantine(600.0)
    quarantine.add(POISON, 0.0, WHY)
    quarantine.add(POISON, 500.0, WHY)
    assert quarantine.refusal(POISON, 1000.0)


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_module, "MAX_PAYLOADS", 2)
    quarantine = Quarantine(600.0)
    requests = [make_request(name, 8, 20) for name in "abc"]
    for request in requests:
        quarantine.add(request, 0.0, WHY)
    assert [quarantine.refusal(request, 1.0) is not None for request in requests] == [False, True, True]


def test_an_operator_sees_what_is_refused_and_clears_one_or_all() -> None:
    quarantine, other = Quarantine(600.0), make_request("other", 8, 20)
    quarantine.add(POISON, 0.0, WHY)
    quarantine.add(other, 1.0, "others have died over it")
    first, second = quarantine.entries(2.0)
    assert (first.request_id, first.num_prompt_tokens, first.until, first.why) == ("poison", 8, 600.0, WHY)
    quarantine.clear(first.payload)
    assert quarantine.refusal(POISON, 2.0) is None
    assert quarantine.entries(2.0) == [second]
    quarantine.clear(first.payload)
    quarantine.add(POISON, 3.0, WHY)
    quarantine.clear(None)
    assert quarantine.entries(3.0) == []
    assert quarantine.refusal(other, 3.0) is None


def test_what_is_over_is_listed_no_more() -> None:
    quarantine = Quarantine(10.0)
    quarantine.add(POISON, 0.0, WHY)
    assert quarantine.entries(10.0) == []


# -- in the core ------------------------------------------------------------------------------------------------------


def convicted(make_cluster: MakeCluster, **config: Any) -> Cluster:
    cluster = make_cluster(**config)
    cluster.join()
    cluster.submit(POISON)
    Poison(cluster, "poison").run()
    return cluster


def test_a_request_that_ends_workers_is_told_what_happened(make_cluster: MakeCluster) -> None:
    cluster = convicted(make_cluster)
    rejected = cluster.rejected["poison"]
    assert rejected.reason is RejectReason.QUARANTINED
    died = "worker-1 (signal SIGSEGV)"
    assert rejected.detail.startswith(
        f"2 workers were lost while they computed this request, {died}, {died}, and then worker {died},"
    )
    assert "refused for 600 s" in rejected.detail


def test_the_same_again_is_refused_for_as_long_as_configured(make_cluster: MakeCluster) -> None:
    cluster = convicted(make_cluster, quarantine_s=30.0)
    cluster.submit(changed(request_id="again"))
    assert cluster.rejected["again"].reason is RejectReason.QUARANTINED
    cluster.now += 30.0
    cluster.submit(changed(request_id="later"))
    assert "later" not in cluster.rejected


def test_another_request_is_served_meanwhile(make_cluster: MakeCluster) -> None:
    cluster = convicted(make_cluster)
    cluster.submit(make_request("innocent", 8, 20))
    cluster.run()
    assert cluster.rejected.keys() == {"poison"}


def test_what_an_operator_has_cleared_is_taken_again(make_cluster: MakeCluster) -> None:
    cluster = convicted(make_cluster)
    [entry] = cluster.core.quarantine.entries(cluster.now)
    cluster.handle(QuarantineCleared(entry.payload))
    cluster.submit(changed(request_id="again"))
    assert "again" not in cluster.rejected
    cluster.run()
    assert "again" in cluster.finished

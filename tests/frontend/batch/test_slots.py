"""How tenants share the slots of calls."""

import asyncio

from octavo.frontend.batch.slots import Slots


async def test_a_slot_goes_to_the_tenant_with_fewest() -> None:
    slots = Slots(3)
    for _ in range(3):
        await slots.take("a")
    order: list[str] = []

    async def wait(tenant: str) -> None:
        await slots.take(tenant)
        order.append(tenant)

    tasks = [asyncio.create_task(wait(tenant)) for tenant in ("a", "a", "b", "b", "c")]
    await asyncio.sleep(0)
    for _ in range(3):
        slots.release("a")
        await asyncio.sleep(0)
    assert order == ["b", "c", "a"]
    for _ in range(2):
        slots.release(order[0])
        order.append("-")
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert sorted(each for each in order if each != "-") == ["a", "a", "b", "b", "c"]


async def test_one_that_gives_up_takes_no_slot_with_it() -> None:
    slots = Slots(1)
    await slots.take("a")
    early = asyncio.create_task(slots.take("b"))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.gather(early, return_exceptions=True)
    late = asyncio.create_task(slots.take("b"))
    await asyncio.sleep(0)
    slots.release("a")
    # It is given a slot in the turn in which it gives up.
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    async with asyncio.timeout(60):
        await slots.take("c")

"""Clients are told the same of every sampling field through every interface, word for word, as they were before."""

from tests.frontend.refusals import differences, told


async def test_every_field_at_its_limits_and_beyond_is_told_as_ever() -> None:
    lines = await told()
    assert len(lines) > 400
    assert list(differences(lines)) == []

"""Who a caller is, whom it speaks for, and whose cached prefixes it sees."""

from typing import Any

import pytest

from octavo.frontend.access.access import Access, ApiKeys, Bounds, authorization_of, read_api_keys, tenant_from_headers
from octavo.frontend.errors import InvalidRequest, Unauthenticated
from octavo.frontend.request.request import ANYBODY, Caller, GenerationRequest
from octavo.testbed.credentials import KEYS, write_keys

ALICE, BOB, GATEWAY = Caller("alice", False), Caller("bob", False), Caller("gateway", True)


@pytest.fixture
def keys(tmp_path: Any) -> ApiKeys:
    return read_api_keys(write_keys(tmp_path / "keys.json"), Bounds())


@pytest.fixture
def access(keys: ApiKeys) -> Access:
    return Access(keys)


def form(**fields: Any) -> GenerationRequest:
    return GenerationRequest("x", **fields)


def test_without_a_file_nobody_is_asked() -> None:
    access = Access()
    assert not access.asks_for_keys
    assert access.identify(None) == access.identify("Bearer whatever") == ANYBODY
    assert access.tenant(form(tenant="any"), ANYBODY) == "any"
    assert access.salt(form(salt="s"), ANYBODY) == "s"


def test_the_key_says_who_calls(access: Access) -> None:
    assert access.asks_for_keys
    assert access.identify(f"Bearer {KEYS['alice']}") == ALICE
    assert access.identify(f"bearer  {KEYS['gateway']} ") == GATEWAY


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Basic {KEYS['alice']}", KEYS["alice"], f"Bearer {KEYS['alice']}x", "Bearer é"],
)
def test_no_key_and_wrong_keys(access: Access, authorization: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        access.identify(authorization)
    assert "sk-" not in str(caught.value)


def test_every_key_of_the_file_is_compared_every_time(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.extend((known, given))
        return known == given

    monkeypatch.setattr("octavo.frontend.access.access.hmac.compare_digest", compare)
    for key in (*KEYS.values(), "unknown"):
        compared.clear()
        keys.find(key)
        assert [len(digest) for digest in compared] == [32] * 6


def test_the_header_of_other_clients() -> None:
    assert authorization_of({"x-api-key": "k"}) == "Bearer k"
    assert authorization_of({"authorization": "Bearer a", "x-api-key": "k"}) == "Bearer a"
    assert authorization_of({"x-request-id": "k"}) is None


def test_only_the_trusted_speak_for_others(access: Access) -> None:
    assert access.tenant(form(), ALICE) == access.tenant(form(tenant="alice"), ALICE) == "alice"
    assert access.tenant(form(tenant="carol"), GATEWAY) == "carol"
    with pytest.raises(InvalidRequest, match="tenant is 'bob', but this key's tenant is 'alice'; leave it out"):
        access.tenant(form(tenant="bob"), ALICE)


@pytest.mark.parametrize("header", ["x-tenant-id", "x-gateway-inference-fairness-id"])
def test_tenants_in_headers(header: str) -> None:
    assert tenant_from_headers({header: "carol"}, GATEWAY) == "carol"
    assert tenant_from_headers({}, GATEWAY) == "gateway"
    assert tenant_from_headers({header: "alice"}, ALICE) == "alice"
    with pytest.raises(InvalidRequest):
        tenant_from_headers({header: "bob"}, ALICE)


def test_tenants_do_not_meet_in_the_cache(access: Access) -> None:
    salts = {access.salt(form(salt=salt), caller) for caller in (ALICE, BOB) for salt in ("", "s", "t")}
    assert len(salts) == 6
    assert access.salt(form(), ALICE) == access.salt(form(), ALICE)
    # Nobody can name the salt of another.
    assert access.salt(form(salt=access.salt(form(), ALICE)), BOB) not in salts
    assert not [salt for salt in salts if "alice" in salt or len(salt) != 64]


def test_the_salts_are_those_of_every_frontend_with_the_same_file(access: Access, keys: ApiKeys) -> None:
    assert Access(keys).salt(form(), ALICE) == access.salt(form(), ALICE)


def test_the_trusted_name_salts_as_they_are(access: Access) -> None:
    assert access.salt(form(salt="s"), GATEWAY) == "s"


def test_the_salt_of_a_request_that_names_what_is_pinned_is_its_tenants_own(access: Access) -> None:
    assert access.salt(form(pinned_prefix="story"), ALICE) == access.salt(form(), ALICE)

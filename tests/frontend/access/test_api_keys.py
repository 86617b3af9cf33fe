"""The file of API keys: what it may hold, and that no error shows any of it but tenants' names."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.access.access import ApiKeys, ApiKeysError, Bounds, read_api_keys
from octavo.frontend.request.request import Caller

SECRET = "sk-secret-0123456789"
OTHER = "sk-other-0123456789"
DEFAULT = Bounds(7, 700)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(content: object, default: Bounds = DEFAULT) -> ApiKeys:
        path = tmp_path / "keys.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_api_keys(path, default)

    return read


def one(**tenant: object) -> dict[str, object]:
    return {"tenants": {"alice": {"keys": [SECRET], **tenant}}}


def test_keys_as_they_are_and_as_hashes(read: Any) -> None:
    hashed = "sha256:" + hashlib.sha256(OTHER.encode()).hexdigest().upper()
    keys = read({"tenants": {"alice": {"keys": [SECRET]}, "bob": {"keys": [hashed], "trusted": True}}})
    assert keys.find(SECRET) == Caller("alice", trusted=False)
    assert keys.find(OTHER) == Caller("bob", trusted=True)
    assert [keys.find(key) for key in (SECRET[:-1], SECRET + "x", "", "sha256:" + "0" * 64, hashed, "é\ud800")] == [
        None
    ] * 6


def test_a_tenants_own_bounds_stand_before_those_of_all(read: Any) -> None:
    content = {"tenants": {"alice": {"keys": [SECRET], "max_requests": 0}, "bob": {"keys": [OTHER]}}}
    assert read(content).bounds == {"alice": Bounds(0, 700), "bob": DEFAULT}


def test_the_secret_of_salts_is_the_files(read: Any) -> None:
    first = read(one()).salt_secret
    assert read(one(max_requests=3)).salt_secret == first
    assert read({"tenants": {"alice": {"keys": [OTHER]}}}).salt_secret != first
    assert read({**one(), "salt_secret": "pepper"}).salt_secret == b"pepper"


BAD: dict[str, tuple[object, str]] = {
    "no JSON": ('{\n"tenants": ' + SECRET, "is not JSON in line 2"),
    "deep": ("[" * 200_000, "is not JSON"),
    "no object": ([SECRET], "Expected `object`, got `array`"),
    "key for a name": ({SECRET: "alice"}, "unknown field"),
    "key among the fields": (one(**{SECRET: 1}), "unknown field - at `$.tenants[...]`"),
    "a key with a quote among the fields": (one(**{f"a`b\n{SECRET}": 1}), "unknown field - at `$.tenants[...]`"),
    "key for a tenant": ({"tenants": {SECRET: 5}}, "Expected `object`, got `int`"),
    "number for a key": ({"tenants": {"alice": {"keys": [5]}}}, "Expected `str`, got `int`"),
    "text for a switch": (one(trusted="yes"), "Expected `bool`, got `str`"),
    "no tenants": ({"tenants": {}}, "names no tenant"),
    "no keys": ({"tenants": {"alice": {"keys": []}}}, "no key for tenant 'alice'"),
    "short key": ({"tenants": {"alice": {"keys": ["sk-secret"]}}}, "too short or no word"),
    "key with a space": ({"tenants": {"alice": {"keys": [SECRET + " "]}}}, "too short or no word"),
    "half a hash": ({"tenants": {"alice": {"keys": ["sha256:" + SECRET]}}}, "not 64 hexadecimal digits"),
    "two owners": (
        {"tenants": {"alice": {"keys": [SECRET]}, "bob": {"keys": [SECRET]}}},
        "a key of tenant 'bob' twice",
    ),
    "negative bound": (one(max_requests=-1), "a negative bound for tenant 'alice'"),
    "unprintable name": ({"tenants": {"a\nb": {"keys": [SECRET]}}}, "not printable"),
    "a name twice": (f'{{"tenants": {{"a": {{"keys": ["{SECRET}"]}}, "a": {{"keys": ["{OTHER}"]}}}}}}', "name twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_line_says_what_is_wrong_and_shows_no_key(name: str, read: Any) -> None:
    content, words = BAD[name]
    with pytest.raises(ApiKeysError) as caught:
        read(content)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert "secret" not in message
    assert caught.value.__cause__ is None, "a traceback would show what the message does not"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError, match=r"cannot read the API keys in .*: Is a directory"):
        read_api_keys(tmp_path, DEFAULT)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(b'{"tenants": "\xff\xff"}')
    with pytest.raises(ApiKeysError, match="is not JSON"):
        read_api_keys(tmp_path / "keys.json", DEFAULT)

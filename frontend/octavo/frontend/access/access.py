"""Reads the operator's file of tenants and API keys, identifies callers, and derives the cache salts of tenants.

No error message shows anything of the file but the tenants' names.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Reason, Unauthenticated, bad_parameter
from octavo.frontend.request.pooling import PoolingRequest
from octavo.frontend.request.request import ANYBODY, MAX_LABEL_LENGTH, Caller, GenerationRequest

# Shorter keys can be guessed.
MIN_KEY_LENGTH: Final = 16
_HASHED: Final = "sha256:"
_EXAMPLE: Final = '{"tenants": {"name": {"keys": ["sk-..."]}}}'


class ApiKeysError(ValueError):
    """The file of API keys cannot be used. The message says what to do, and shows no key."""


class Bounds(NamedTuple):
    """Bounds what one tenant, or all tenants together, may hold at once; 0 is no bound."""

    max_requests: int = 0
    max_work_tokens: int = 0


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    """Describes one tenant in the file. Each of `keys` is a key, or its hash as sha256:<hex>.

    Bounds that are left out are those of the command line.
    """

    keys: list[str]
    trusted: bool = False
    max_requests: int | None = None
    max_work_tokens: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: dict[str, _Tenant]
    salt_secret: str = ""


@dataclass(frozen=True)
class ApiKeys:
    """Holds callers beside the SHA-256 of their keys, and the bounds of tenants by name.

    The tenants' cache salts are derived from `salt_secret`.
    """

    callers: tuple[tuple[bytes, Caller], ...]
    bounds: Mapping[str, Bounds]
    salt_secret: bytes

    def find(self, key: str) -> Caller | None:
        """Returns the caller with this key, or None.

        Every key takes the same time, so that the time tells nothing about the keys in the file.
        """
        digest = _digest(key)
        found = None
        for known, caller in self.callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def read_api_keys(path: Path, default: Bounds) -> ApiKeys:
    """Reads the keys in `path`. The bounds in `default` hold for tenants without their own. Raises `ApiKeysError`."""
    content = _parse(path)
    callers: dict[bytes, Caller] = {}
    for name, tenant in content.tenants.items():
        _check_tenant(path, name, tenant)
        for key in tenant.keys:
            digest = _digest_of_entry(path, name, key)
            if digest in callers:
                raise ApiKeysError(f"{path} has a key of tenant {name!r} twice; give each tenant keys of its own")
            callers[digest] = Caller(name, tenant.trusted)
    if not callers:
        raise ApiKeysError(f"{path} names no tenant, so nobody could call; write {_EXAMPLE}")
    bounds = {name: _bounds(tenant, default) for name, tenant in content.tenants.items()}
    return ApiKeys(tuple(callers.items()), bounds, _salt_secret(content.salt_secret, callers))


def _parse(path: Path) -> _File:
    try:
        return msgspec.convert(json.loads(path.read_bytes(), object_pairs_hook=_once), _File)
    except OSError as error:
        raise ApiKeysError(f"cannot read the API keys in {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ApiKeysError(f"{path} is no file of API keys: {_without_names(str(error))}; write {_EXAMPLE}") from None
    except _RepeatedName:
        raise ApiKeysError(f"{path} has the same name twice in one object; give each its own") from None
    except (ValueError, RecursionError) as error:
        place = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiKeysError(f"{path} is not JSON{place}; write {_EXAMPLE}") from None


class _RepeatedName(Exception):
    """A JSON object holds two equal names, of which the first would be lost silently."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise _RepeatedName
    return content


def _without_names(message: str) -> str:
    """Cuts unknown names out of msgspec's message, for a key may stand where a name should."""
    return re.sub(r"(unknown field) `.*?`( - at `[^`]*`)?$", r"\1\2", message, flags=re.DOTALL)


def _check_tenant(path: Path, name: str, tenant: _Tenant) -> None:
    if not (1 <= len(name) <= MAX_LABEL_LENGTH and name.isprintable()):
        rule = f"use 1 to {MAX_LABEL_LENGTH} printable characters"
        raise ApiKeysError(f"{path} has a tenant whose name is {len(name)} characters long or not printable; {rule}")
    if not tenant.keys:
        raise ApiKeysError(f"{path} has no key for tenant {name!r}; add one, or remove the tenant")
    if min(tenant.max_requests or 0, tenant.max_work_tokens or 0) < 0:
        raise ApiKeysError(f"{path} has a negative bound for tenant {name!r}; 0 is no bound")


def _digest_of_entry(path: Path, name: str, key: str) -> bytes:
    if key.startswith(_HASHED):
        if re.fullmatch(r"[0-9a-fA-F]{64}", key.removeprefix(_HASHED)):
            return bytes.fromhex(key.removeprefix(_HASHED))
        raise ApiKeysError(f"{path} has a hash of tenant {name!r} that is not 64 hexadecimal digits after {_HASHED}")
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ApiKeysError(
            f"{path} has a key of tenant {name!r} that is too short or no word; use {MIN_KEY_LENGTH} or more letters,"
            " digits and signs without spaces"
        )
    return _digest(key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _bounds(tenant: _Tenant, default: Bounds) -> Bounds:
    own = Bounds(tenant.max_requests, tenant.max_work_tokens)  # type: ignore[arg-type]
    return Bounds(*(fallback if value is None else value for value, fallback in zip(own, default, strict=True)))


def _salt_secret(given: str, digests: Mapping[bytes, Caller]) -> bytes:
    """Returns the secret, the same in every frontend that reads the same file."""
    return given.encode() if given else hashlib.sha256(b"cache salt" + b"".join(sorted(digests))).digest()


# Headers in which a trusted caller names the tenant that it speaks for.
_TENANT_HEADERS: Final = ("x-tenant-id", "x-gateway-inference-fairness-id")


class Access:
    """Identifies callers. Without `keys`, every caller is `ANYBODY`."""

    def __init__(self, keys: ApiKeys | None = None) -> None:
        self._keys = keys

    @property
    def asks_for_keys(self) -> bool:
        """Tells whether a call needs credentials."""
        return self._keys is not None

    @property
    def bounds(self) -> Mapping[str, Bounds]:
        """Returns the bounds of tenants that have their own, by name."""
        return self._keys.bounds if self._keys else {}

    def identify(self, authorization: str | None) -> Caller:
        """Returns the caller with this `authorization` header or metadata. Raises `Unauthenticated`."""
        if self._keys is None:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(Reason.UNAUTHENTICATED, "this server asks for an API key; send Bearer and the key")
        if (caller := self._keys.find(key.strip())) is None:
            raise Unauthenticated(Reason.UNAUTHENTICATED, "this server does not know this API key; check it")
        return caller

    def tenant(self, request: GenerationRequest | PoolingRequest, caller: Caller) -> str:
        """Returns the tenant of `request`.

        Raises `InvalidRequest` if the caller must not speak for the tenant that the request names.
        """
        return tenant_of(request.tenant, caller)

    def salt(self, request: GenerationRequest | PoolingRequest, caller: Caller) -> str:
        """Returns the salt that keeps the cached prefixes of `request` apart from those of other salts.

        The prefixes of two tenants are always apart, even if neither names a salt, unless the caller is trusted.
        """
        if self._keys is None or caller.trusted:
            return request.salt
        # Neither text can hold the byte between them.
        own = f"{caller.tenant}\0{request.salt}".encode()
        return hmac.digest(self._keys.salt_secret, own, "sha256").hex()


def build_access(config: FrontendConfig) -> Access:
    """Makes the access of a frontend, from its file of API keys if there is one. Raises `ApiKeysError`."""
    if config.api_keys is None:
        return Access()
    return Access(read_api_keys(config.api_keys, Bounds(config.tenant_max_requests, config.tenant_max_work_tokens)))


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """Returns the credentials in a call's headers or metadata, whose names are in lower case, or None."""
    if (authorization := headers.get("authorization")) is not None:
        return authorization
    key = headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def tenant_from_headers(headers: Mapping[str, str], caller: Caller) -> str:
    """Returns the tenant that a caller speaks for by its headers or metadata, whose names are in lower case.

    A caller that names no tenant speaks for its own. Raises `InvalidRequest` for a tenant that the caller must not
    speak for.
    """
    return tenant_of(next((headers[name] for name in _TENANT_HEADERS if headers.get(name)), ""), caller)


def tenant_of(named: str, caller: Caller) -> str:
    """Returns the tenant `named`, or the caller's own if `named` is empty.

    Raises `InvalidRequest` if the caller must not speak for that tenant.
    """
    if named in ("", caller.tenant):
        return caller.tenant
    if not caller.trusted:
        raise bad_parameter("tenant", repr(named), f"this key's tenant is {caller.tenant!r}; leave it out")
    return named

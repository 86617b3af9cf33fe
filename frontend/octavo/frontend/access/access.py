"""Who may call: API keys, the tenants they stand for, and what is a tenant's own."""

import hmac
from collections.abc import Mapping
from typing import Final

from octavo.frontend.access.api_keys import ApiKeys, Bounds, read_api_keys
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Reason, Unauthenticated, bad_parameter
from octavo.frontend.request.request import ANYBODY, Caller, GenerationRequest

# In which a trusted caller names the tenant it speaks for.
_TENANT_HEADERS: Final = ("x-tenant-id", "x-gateway-inference-fairness-id")


class Access:
    """Asks for nothing, unless it has keys."""

    def __init__(self, keys: ApiKeys | None = None) -> None:
        self._keys = keys

    @property
    def asks_for_keys(self) -> bool:
        """Whether a call needs credentials."""
        return self._keys is not None

    @property
    def bounds(self) -> Mapping[str, Bounds]:
        """What tenants may hold at once, of those that have bounds of their own."""
        return self._keys.bounds if self._keys else {}

    def identify(self, authorization: str | None) -> Caller:
        """The caller whose `authorization` header or metadata this is. Raises `Unauthenticated`."""
        if self._keys is None:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(Reason.UNAUTHENTICATED, "this server asks for an API key; send Bearer and the key")
        if (caller := self._keys.find(key.strip())) is None:
            raise Unauthenticated(Reason.UNAUTHENTICATED, "this server does not know this API key; check it")
        return caller

    def tenant(self, request: GenerationRequest, caller: Caller) -> str:
        """Whose request it is. Raises `InvalidRequest` if the caller must not speak for the tenant that it names."""
        return tenant_of(request.tenant, caller)

    def salt(self, request: GenerationRequest, caller: Caller) -> str:
        """What separates its cached prefixes from those of others: of other tenants, even if it names no salt."""
        if self._keys is None or caller.trusted:
            return request.salt
        # Neither text can hold the byte between them.
        own = f"{caller.tenant}\0{request.salt}".encode()
        return hmac.digest(self._keys.salt_secret, own, "sha256").hex()


def build_access(config: FrontendConfig) -> Access:
    """Reads the file of API keys, where there is one. Raises `ApiKeysError`."""
    if config.api_keys is None:
        return Access()
    return Access(read_api_keys(config.api_keys, Bounds(config.tenant_max_requests, config.tenant_max_work_tokens)))


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The credentials among a call's headers or metadata, whose names are in lower case."""
    if (authorization := headers.get("authorization")) is not None:
        return authorization
    key = headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def tenant_from_headers(headers: Mapping[str, str], caller: Caller) -> str:
    """The tenant that a caller speaks for by its headers or metadata, whose names are in lower case: its own where they
    say nothing. Raises `InvalidRequest` if it must not speak for the one that it names."""
    return tenant_of(next((headers[name] for name in _TENANT_HEADERS if headers.get(name)), ""), caller)


def tenant_of(named: str, caller: Caller) -> str:
    """The tenant of a caller that names one, or none. Raises `InvalidRequest` if it must not speak for that one."""
    if named in ("", caller.tenant):
        return caller.tenant
    if not caller.trusted:
        raise bad_parameter("tenant", repr(named), f"this key's tenant is {caller.tenant!r}; leave it out")
    return named

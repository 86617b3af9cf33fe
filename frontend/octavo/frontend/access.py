"""Who may call: API keys, the tenants they stand for, and what is a tenant's own."""

from octavo.frontend.caller import ANYBODY, Caller
from octavo.frontend.errors import bad_parameter
from octavo.frontend.request import GenerationRequest


class Access:
    """Asks for nothing."""

    @property
    def asks_for_keys(self) -> bool:
        """Whether a call needs credentials."""
        return False

    def identify(self, authorization: str | None) -> Caller:
        """The caller whose `authorization` header or metadata this is. Raises `Unauthenticated`."""
        return ANYBODY

    def tenant(self, request: GenerationRequest, caller: Caller) -> str:
        """Whose request it is. Raises `InvalidRequest` if the caller must not speak for the tenant that it names."""
        if caller.trusted:
            return request.tenant or caller.tenant
        if request.tenant not in ("", caller.tenant):
            raise bad_parameter("tenant", repr(request.tenant), f"this key's tenant is {caller.tenant!r}; leave it out")
        return caller.tenant

    def salt(self, request: GenerationRequest, caller: Caller) -> str:
        """What separates its cached prefixes from those of others."""
        return request.salt

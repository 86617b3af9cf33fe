"""Who calls, as the door has found out from the call's credentials."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """`tenant` is who shares the service fairly with others. A `trusted` caller may speak for any tenant, and name
    cache salts as they are: everybody is, where no keys are asked for."""

    tenant: str = ""
    trusted: bool = True


# Where no keys are asked for.
ANYBODY = Caller()

"""What a connection needs to be let in."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, repr=False)
class Secrets:
    """`api_key` is shown nowhere, which is why there is no repr of it; it is from the environment's `variable`.
    `ca_certificate` is a PEM file. Raises `ValueError` for a key that cannot be sent."""

    api_key: str | None = None
    ca_certificate: Path | None = None
    variable: str = "OCTAVO_API_KEY"

    def __post_init__(self) -> None:
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError(f"the key of {self.variable} has characters that no header can hold, such as a line's end")

    @property
    def advice(self) -> str:
        """What a server does that does not let in, and what to do."""
        if self.api_key:
            return f"does not take this API key; check {self.variable}"
        return f"asks for an API key; set {self.variable}"

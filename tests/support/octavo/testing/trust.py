"""Has HTTP clients of the tests, of which few use TLS, read the certificates of the world's authorities once."""

import functools
import ssl
import sys
from typing import Any

import pytest


def share_trust_stores(patch: pytest.MonkeyPatch) -> None:
    """Gives clients that trust what is trusted by default one TLS context for each HTTP library that was imported: it
    takes longer to read its hundred certificates than a request takes."""
    if "httpx" in sys.modules:
        import certifi

        patch.setattr(ssl, "create_default_context", _made_once(certifi.where()))
    if "httpx2" in sys.modules:
        import httpcore2

        patch.setattr(httpcore2, "default_ssl_context", functools.cache(httpcore2.default_ssl_context))


def _made_once(authorities: str) -> Any:
    make = ssl.create_default_context
    shared = functools.cache(lambda: make(cafile=authorities))

    def create_default_context(*purpose: Any, **locations: Any) -> ssl.SSLContext:
        return shared() if not purpose and locations == {"cafile": authorities} else make(*purpose, **locations)

    return create_default_context

"""A file of API keys: of two ordinary tenants, and a gateway that is trusted."""

import json
from pathlib import Path
from typing import Final

KEYS: Final = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789ab", "gateway": "sk-gateway-0123456789"}


def write_keys(path: Path) -> Path:
    """Writes the file, and says where it is."""
    tenants = {name: {"keys": [key], "trusted": name == "gateway"} for name, key in KEYS.items()}
    path.write_text(json.dumps({"tenants": tenants}))
    return path


def bearer(tenant: str) -> str:
    """What a caller of the tenant sends as `authorization`."""
    return f"Bearer {KEYS[tenant]}"

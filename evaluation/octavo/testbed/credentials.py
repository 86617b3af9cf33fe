"""Makes files of API keys, and certificates as an operator has them made by OpenSSL's command line."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KEYS: Final = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789ab", "gateway": "sk-gateway-0123456789"}


def write_keys(path: Path) -> Path:
    """Writes the file, and says where it is."""
    tenants = {name: {"keys": [key], "trusted": name == "gateway"} for name, key in KEYS.items()}
    path.write_text(json.dumps({"tenants": tenants}))
    return path


def bearer(tenant: str) -> str:
    """Returns the `authorization` that a caller of the tenant sends."""
    return f"Bearer {KEYS[tenant]}"


_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
# Without it an authority is none to those who verify strictly, as Python does from 3.13 on.
_SIGNS = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
_SPEAKS = (
    "-addext",
    "basicConstraints=critical,CA:FALSE",
    "-addext",
    "keyUsage=critical,digitalSignature",
    "-addext",
    "extendedKeyUsage=serverAuth,clientAuth",
)


@dataclass(frozen=True)
class Pair:
    """Holds the paths of a certificate and its key, PEM files both."""

    certificate: Path
    key: Path


def make_authority(directory: Path, name: str) -> Pair:
    """Makes a certificate that signs others. Raises `FileNotFoundError` where there is no OpenSSL."""
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    _openssl(
        "req",
        "-x509",
        *_CURVE,
        *_SIGNS,
        "-subj",
        f"/CN={name}",
        "-days",
        "2",
        "-keyout",
        pair.key,
        "-out",
        pair.certificate,
    )
    return pair


def make_certificate(authority: Pair, name: str) -> Pair:
    """Makes a certificate for `name` and for 127.0.0.1, which servers and clients may use."""
    pair = Pair(authority.key.with_name(f"{name}.pem"), authority.key.with_name(f"{name}.key"))
    names = ("-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1", *_SPEAKS)
    signed = ("-CA", authority.certificate, "-CAkey", authority.key, "-days", "2")
    _openssl(
        "req", "-x509", *_CURVE, *signed, "-subj", f"/CN={name}", *names, "-keyout", pair.key, "-out", pair.certificate
    )
    return pair


def encrypt(key: Path) -> Path:
    """Encrypts the key under a passphrase, and returns the path of the result."""
    encrypted = key.with_suffix(".encrypted")
    _openssl("ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", encrypted)
    return encrypted


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

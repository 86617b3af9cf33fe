"""Configures TLS for gRPC and HTTP from the same PEM files.

With an authority for clients, both ask clients for a certificate of that authority.
"""

import ssl
from pathlib import Path
from typing import NoReturn

import grpc

from octavo.frontend.config import FrontendConfig


class TlsError(ValueError):
    """The PEM files cannot be used. The message says what to do."""


def server_credentials(config: FrontendConfig) -> grpc.ServerCredentials | None:
    """Returns the credentials for gRPC, or None to serve in the clear. Raises `TlsError`."""
    # gRPC does not say what is wrong with a file, so the context for HTTP is made first.
    if ssl_context_of(config) is None:
        return None
    assert config.tls_certificate is not None
    assert config.tls_key is not None
    client_ca = config.tls_client_ca.read_bytes() if config.tls_client_ca else None
    return grpc.ssl_server_credentials(
        [(config.tls_key.read_bytes(), config.tls_certificate.read_bytes())],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def ssl_context_of(config: FrontendConfig) -> ssl.SSLContext | None:
    """Returns the TLS context for HTTP, or None to serve in the clear. Raises `TlsError`."""
    certificate, key, client_ca = config.tls_certificate, config.tls_key, config.tls_client_ca
    if certificate is None and key is None:
        if client_ca is not None:
            raise TlsError("--tls-client-ca asks clients for TLS; give --tls-certificate and --tls-key too")
        return None
    if certificate is None or key is None:
        missing = "--tls-certificate" if certificate is None else "--tls-key"
        raise TlsError(f"TLS needs a certificate and its key; give {missing} too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, certificate, key)
    if client_ca is not None:
        _load_client_ca(context, client_ca)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def refuse() -> NoReturn:
        raise TlsError(f"the key {key} is encrypted, and nobody is there to type its passphrase; store it without one")

    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except OSError as error:
        raise TlsError(
            f"{certificate} and {key} are no certificate and its key ({error.strerror}); give PEM files that belong"
            " together"
        ) from error


def _load_client_ca(context: ssl.SSLContext, client_ca: Path) -> None:
    try:
        context.load_verify_locations(client_ca)
    except OSError as error:
        raise TlsError(f"{client_ca} holds no authority's certificate ({error.strerror}); give a PEM file") from error
    context.verify_mode = ssl.CERT_REQUIRED

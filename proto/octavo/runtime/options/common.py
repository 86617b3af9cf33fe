"""The options that several processes have alike."""

from typing import Final

from octavo.runtime.options.option import FilePath, Option

INSECURE_TCP: Final = Option(
    "--insecure-tcp",
    "Allow tcp:// endpoints beyond loopback: unencrypted, for networks that only Octavo's processes can reach.",
)
METRICS_LISTEN: Final = Option(
    "--metrics-listen", "Where to serve Prometheus metrics, as host:port; never public. Default: nowhere."
)
INSECURE_METRICS: Final = Option(
    "--insecure-metrics", "Allow a --metrics-listen beyond this machine: it asks nobody for a key."
)
OTLP_ENDPOINT: Final = Option(
    "--otlp-endpoint", "OTLP collector (gRPC) to send traces to, as http://host:port. Default: no traces."
)
API_KEYS: Final = Option(
    "--api-keys", "JSON file of tenants and their API keys; without one nobody is asked for a key.", FilePath()
)
TLS_CERTIFICATE: Final = Option("--tls-certificate", "PEM file, for gRPC and HTTP.", FilePath())
TLS_KEY: Final = Option("--tls-key", "PEM file of the certificate's key.", FilePath())
TLS_CLIENT_CA: Final = Option(
    "--tls-client-ca", "PEM file: clients must show a certificate that one of these authorities has signed.", FilePath()
)
PINNED_PREFIXES: Final = Option(
    "--pinned-prefixes",
    'JSON file {"name": "text", ...}: beginnings of prompts that stay computed, for requests to name.',
    FilePath(),
)

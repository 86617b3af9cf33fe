"""The options that several processes have alike."""

from typing import Final

from octavo.runtime.options.option import Option

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

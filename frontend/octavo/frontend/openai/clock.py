"""The time of day, which clients are shown and nothing is measured with."""

from datetime import UTC, datetime


def unix_time() -> int:
    """Seconds since 1970."""
    return int(datetime.now(UTC).timestamp())

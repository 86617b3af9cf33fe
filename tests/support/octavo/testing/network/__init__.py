"""Networks that fail, between real processes: `python -m octavo.testing.network cuts --count 3`."""

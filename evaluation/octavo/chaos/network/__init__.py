"""Networks that fail, between real processes: `python -m octavo.chaos.network cuts --count 3`."""

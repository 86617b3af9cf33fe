"""Bad input in bulk against real processes: `python -m octavo.testing.fuzz --surface http --messages 100000`."""

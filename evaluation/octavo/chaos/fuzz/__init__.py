"""Bad input in bulk against real processes: `python -m octavo.chaos.fuzz --surface http --messages 100000`."""

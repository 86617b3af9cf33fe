"""Sends bad input in bulk to real processes: `python -m octavo.chaos.fuzz --surface http --messages 100000`."""

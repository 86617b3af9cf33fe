"""Holds what all processes need besides the contract: telemetry, transport, models, and the life of a process."""

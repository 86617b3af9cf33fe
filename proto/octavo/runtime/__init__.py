"""What all processes stand on besides the contract: telemetry, transport, models, the life of a process."""

"""The costs of steps on this worker, measured before it serves."""

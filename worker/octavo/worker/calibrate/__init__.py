"""What steps cost on this worker, measured before it serves."""

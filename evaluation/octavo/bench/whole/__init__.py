"""Measures all processes at once: failover, ranks, simulations beside reality."""

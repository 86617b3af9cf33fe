"""All processes at once, and what becomes of them: failover, ranks, simulations beside reality."""

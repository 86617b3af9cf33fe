"""Faults: requests over which workers may have died, and workers that stand still."""

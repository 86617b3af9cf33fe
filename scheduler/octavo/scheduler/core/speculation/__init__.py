"""Speculation: guesses of sequences' next tokens, and how many of them a step should check."""

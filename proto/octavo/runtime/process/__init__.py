"""How processes live and end together."""

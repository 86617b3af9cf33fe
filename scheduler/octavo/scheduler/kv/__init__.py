"""One replica's KV memory: which blocks there are, who holds them, and what is known of their content."""

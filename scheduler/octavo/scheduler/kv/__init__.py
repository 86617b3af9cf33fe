"""The KV memory of one replica: which blocks there are, who holds them, and what content they are known to have."""

"""Computes the layers around paged attention: matrix products, norms, rotary embedding, gates."""

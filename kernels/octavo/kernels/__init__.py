"""Computes on paged keys and values: a plain-torch reference, which is the oracle, and the kernels that production
calls."""

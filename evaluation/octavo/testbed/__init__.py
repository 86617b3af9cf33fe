"""Starts real processes for benchmarks, campaigns and tests, cuts them off, watches and judges them."""

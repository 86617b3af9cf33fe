"""Computes paged attention and what a step needs around it on GPUs, in Triton. Imported only where there is Triton."""

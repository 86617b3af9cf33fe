"""Paged attention and what a step needs around it, for GPUs, in Triton. Imported only where there is Triton."""

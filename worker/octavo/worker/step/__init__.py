"""A step's forward pass: the batch of work items, the paged KV cache, and the executor that computes them."""

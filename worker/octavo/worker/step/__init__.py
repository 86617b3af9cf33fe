"""A step's forward pass: a batch of work items, the paged cache, and what computes them."""

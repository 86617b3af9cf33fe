"""The worker: one replica's weights and KV cache, the forward pass and sampling, driven by the scheduler's plans."""

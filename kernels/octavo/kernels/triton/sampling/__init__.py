"""Samples tokens from logits on the device."""

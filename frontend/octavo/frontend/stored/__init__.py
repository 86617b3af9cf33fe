"""Keeps responses and conversations, for clients that come back to them."""
